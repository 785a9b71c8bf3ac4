"""Writing with a cache: the same text as without one, alone or in a batch, on any thread count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treadle
from runs import SMALL, fail, run, succeed, write_text
from treadle.backends import select
from treadle.backends.base import Backend, Executable
from treadle.backends.numpy import NumpyBackend
from treadle.data.tokenizer import Tokenizer
from treadle.errors import ConfigError
from treadle.generate import Decoder, Sampling, StopStrings, Writer, add_generation, write_weight
from treadle.graph.program import Program
from treadle.models.base import Model, declare, read_weights
from treadle.models.gemma import Gemma
from treadle.models.gpt2 import GPT2
from treadle.models.llama import Llama

SIZES = GPT2(61, n_layer=2, n_head=4, n_embd=32, block_size=24, tie_embeddings=False)
LLAMA = Llama(61, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, block_size=24)
GEMMA = Gemma(
    61, n_layer=2, n_head=4, n_kv_head=1, n_embd=32, block_size=24, version=2,
    attn_softcap=20.0, final_softcap=30.0, sliding_window=7,
)  # fmt: skip
LONG = GPT2(31, n_layer=1, n_head=2, n_embd=16, block_size=600)


class Counting(Executable):
    """An executable that notes which graphs it runs."""

    def __init__(self, inner: Executable) -> None:
        self.inner, self.program, self.runs = inner, inner.program, list[str]()

    def write(self, name: str, array: Any) -> None:
        self.inner.write(name, array)

    def read(self, name: str) -> np.ndarray:
        return self.inner.read(name)

    def run(self, *graphs: str) -> None:
        self.runs += graphs
        self.inner.run(*graphs)

    def profile(self, graph: str) -> Any:
        return self.inner.profile(graph)


def decoder(
    model: Model, device: str = "cpu", precision: str = "fp32", batch: int = 1, threads: int = 1
) -> Decoder:
    """Of weights large enough that the tokens of a text matter to the next."""
    program = Program()
    declare(program, model, precision, masters=False)
    add_generation(program, model, batch)
    backend: Backend = select(device, threads)[0]
    executable = backend.load(program)
    for p in model.parameters():
        write_weight(executable, p.name, p.initial(3) * (6 if len(p.shape) > 1 else 1))
    return Decoder(Counting(executable), model.block_size)


def forget(made: Decoder) -> Decoder:
    """The same without its cache: it reads the whole text for every token."""
    made._cached = [None] * made.batch
    return made


def ids(model: Model, length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(model.vocab_size, size=length).tolist()


BACKENDS = [("cpu", "fp32"), ("cpu", "bf16"), ("numpy", "fp32")]


@pytest.mark.parametrize(("device", "precision"), BACKENDS)
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.2, top_k=20, seed=5)])
def test_the_same_text_as_without_a_cache(device: str, precision: str, sampling: Sampling) -> None:
    """To beyond the end of the context, where the window slides."""
    made, prompt, tokens = decoder(SIZES, device, precision), ids(SIZES, 7), SIZES.block_size
    written = [token for (token,) in Writer(made, [prompt], tokens, [sampling])]
    assert len(set(written)) > 5  # it does not repeat itself
    text = list(prompt)
    for index in range(tokens):
        text.append(sampling.draw(forget(made).logits([text])[0], index))
    assert text == [*prompt, *written]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model", [SIZES, LONG, LLAMA, GEMMA], ids=["gpt2", "long", "llama", "gemma"]
)
def test_the_same_bits_as_without_a_cache(model: Model, precision: str) -> None:
    made, block = decoder(model, precision=precision), model.block_size
    text = ids(model, block + 2)
    for length in (1, 2, 15, 16, 17, 18, *range(block - 3, block + 3)):
        made.logits([text[: length - 1] or [0]])
        found = made.logits([text[:length]])
        np.testing.assert_array_equal(forget(made).logits([text[:length]]), found)


@pytest.mark.parametrize("model", [SIZES, LLAMA, GEMMA], ids=["gpt2", "llama", "gemma"])
def test_a_token_at_a_time_is_the_model_that_was_trained(model: Model) -> None:
    """Against the graph without a cache, in float64: positions, windows, heads, caps."""
    block = model.block_size
    program = Program()
    declare(program, model)
    add_generation(program, model)
    g = program.graph("plain")
    tokens = g.read(program.buffer("tokens", (1, block), "int32", "input"))
    weights = read_weights(program, g, model)
    logits = model.logits(weights, model.hidden(weights, tokens))
    g.assign(program.buffer("all", logits.shape, "float32", "output"), logits)
    run = NumpyBackend("float64").load(program)
    for p in model.parameters():
        run.write(p.name, p.initial(3) * (6 if len(p.shape) > 1 else 1))
    text = ids(model, block)
    run.write("tokens", [text])
    run.run("plain")
    expected, made = run.read("all")[0], Decoder(run, block)
    for length in range(5, block + 1):
        found = made.logits([text[:length]])[0]
        np.testing.assert_allclose(found, expected[length - 1], rtol=0, atol=1e-11)


def test_threads_do_not_change_bits() -> None:
    found = []
    for threads in (1, 2, 5):
        made, text = decoder(LONG, batch=2, threads=threads), ids(LONG, 599)
        made.logits([text[:-1], text[:300]])
        found.append(made.logits([text, text[:301]]))
    assert all(np.array_equal(x, found[0]) for x in found)


def test_a_token_costs_a_token() -> None:
    made = decoder(SIZES)
    list(Writer(made, [ids(SIZES, 10)], 16, [Sampling(0.0)]))
    runs = made.executable.runs  # type: ignore[attr-defined]
    assert runs == ["prefill_16", *["decode"] * 14, "prefill_24"]


@pytest.mark.parametrize(("device", "precision"), BACKENDS)
def test_prompts_side_by_side_are_written_as_alone(device: str, precision: str) -> None:
    """Of different lengths, some ending early, some going beyond the context, one alone."""
    prompts = [ids(SIZES, length, seed=length) for length in (1, 20, 5, 30, 16)]
    sampling = [Sampling(1.0, seed=i) for i in range(len(prompts))]
    stop = range(8)
    together = decoder(SIZES, device, precision, batch=6)
    steps = list(Writer(together, prompts, 12, sampling, stop))
    lengths = set()
    for i, prompt in enumerate(prompts):
        alone = Writer(decoder(SIZES, device, precision), [prompt], 12, sampling[i : i + 1], stop)
        expected = [token for (token,) in alone]
        found = [step[i] for step in steps]
        assert found == [*expected, *[None] * (len(steps) - len(expected))]
        lengths.add(len(expected))
    assert len(lengths) > 1


def test_texts_in_turn_do_not_disturb_each_other() -> None:
    made = decoder(SIZES)
    one, other = (Writer(made, [ids(SIZES, 5, seed)], 8, [Sampling(0.0)]) for seed in (1, 2))
    pairs = list(zip(one, other, strict=True))
    for i, seed in enumerate((1, 2)):
        alone = Writer(forget(made), [ids(SIZES, 5, seed)], 8, [Sampling(0.0)])
        assert [pair[i] for pair in pairs] == list(alone)


def test_a_bf16_program_holds_no_float32_matrices() -> None:
    sizes = {}
    for precision in ("fp32", "bf16"):
        buffers = decoder(SIZES, "numpy", precision).executable.program.buffers.values()
        roles = ("weight", "shadow", "cache")
        sizes[precision] = sum(b.nbytes for b in buffers if b.role in roles)
    assert sizes["bf16"] < 0.55 * sizes["fp32"]


# ---------------------------------------------------------------- stop strings


@given(
    st.lists(st.text("ab", max_size=4), max_size=9),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_a_text_ends_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    """Against a search in the text so far, which a later piece never takes back."""
    cut, shown = StopStrings(stops), ""
    whole = ""
    for piece in pieces:
        whole += piece
        shown += cut.push(piece)
        assert whole.startswith(shown)
        first = min((at for at in map(whole.find, stops) if at >= 0), default=None)
        assert cut.met == (first is not None)
        if first is not None:
            assert shown == whole[:first]
            return
    assert shown + cut.finish() == whole
    assert StopStrings([]).push(whole) == whole


# ---------------------------------------------------------------- Python, and the command


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    flags = (*SMALL, "--lr", 0.02, "--steps", 60)
    succeed("train", "--data", write_text(folder / "text.txt"), *flags, "--out", folder / "run")
    return folder / "run"


def test_many_prompts_in_python(trained: Path) -> None:
    model = treadle.load(trained, threads=1)
    prompts = ["the cat", "a", "", "the dog sat on a mat and the cat"]
    alone = [model.generate(prompt, 30, seed=4 + i) for i, prompt in enumerate(prompts)]
    for batch in (1, 3, 8):
        assert model.generate(prompts, 30, seed=4, batch_size=batch) == alone
    assert model.generate([], 30) == []
    assert len(model.generate("the cat", 30, precision="bf16")) == 37
    with pytest.raises(ConfigError, match="precision must be fp32 or bf16, got 'fp8'"):
        model.generate("the", 3, precision="fp8")


def test_stop_strings_in_python(trained: Path) -> None:
    model = treadle.load(trained, threads=1)
    text = model.generate("the ", 60, temperature=0)
    new = text[4:]
    at = new.index(" ", 5)
    assert model.generate("the ", 60, temperature=0, stop=new[at : at + 4]) == text[: 4 + at]
    assert model.generate("the ", 60, temperature=0, stop=["§", "¶"]) == text
    with pytest.raises(ConfigError, match="stop string"):
        model.generate("the ", 3, stop=[""])


def test_many_prompts_in_the_shell(trained: Path, tmp_path: Path) -> None:
    alone = [
        succeed("generate", trained, "--prompt", prompt, "--tokens", 20, "--seed", seed)
        for seed, prompt in enumerate(("the", "a"))
    ]
    flags = ("--prompt", "the", "--prompt", "a", "--tokens", 20)
    assert succeed("generate", trained, *flags) == f"--- 1\n{alone[0]}--- 2\n{alone[1]}"
    (tmp_path / "prompts.txt").write_bytes(b"the\r\n\r\na\r\n")
    flags = ("--prompts", tmp_path / "prompts.txt", "--tokens", 20, "--jsonl", "--batch-size", 1)
    lines = [json.loads(line) for line in succeed("generate", trained, *flags).splitlines()]
    assert [line["prompt"] + line["text"] + "\n" for line in lines] == alone
    result = run("generate", trained, "--prompt", "the", "--prompt", "a", "--tokens", 99)
    assert result.err.count("longer than the context") == 1


def test_prompts_that_cannot_be_read(trained: Path, tmp_path: Path) -> None:
    assert "No such file" in fail("generate", trained, "--prompts", tmp_path / "none.txt")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    assert "byte 3 is not UTF-8" in fail("generate", trained, "--prompts", tmp_path / "latin.txt")
    (tmp_path / "blank.txt").write_text("\n \n")
    assert "no prompts" in fail("generate", trained, "--prompts", tmp_path / "blank.txt")


def test_stopping_in_the_shell(trained: Path) -> None:
    text = succeed("generate", trained, "--prompt", "the", "--tokens", 40, "--temperature", 0)
    stop = text[10:12]
    flags = ("--prompt", "the", "--tokens", 40, "--temperature", 0, "--stop", stop)
    assert succeed("generate", trained, *flags).removesuffix("\n") == text[: text.index(stop, 3)]


def test_the_tokenizers_end_of_text_is_a_stop(trained: Path) -> None:
    tokenizer = Tokenizer.byte()
    sizes = GPT2(257, n_layer=1, n_head=1, n_embd=8, block_size=8, tie_embeddings=False)
    weights = {p.name: p.initial(0) for p in sizes.parameters()}
    model = treadle.LanguageModel(sizes, tokenizer, weights, device="numpy")
    weights["lm_head.weight"][tokenizer.eos_id] = 0
    hidden = model.generate("ab", 30, temperature=0)
    assert len(hidden) > 2
    weights["transformer.ln_f.bias"][:] = 1
    weights["lm_head.weight"][tokenizer.eos_id] = 9
    ended = treadle.LanguageModel(sizes, tokenizer, weights, device="numpy")
    assert ended.generate(["ab", "c"], 30) == ["ab", "c"]
