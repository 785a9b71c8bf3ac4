"""Text from a model: how tokens are drawn, where the model comes from, what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from runs import SMALL, checkpoint, fail, run, succeed, write_text
from treadle import Sampling
from treadle.backends.numpy import NumpyBackend
from treadle.data.tokenizer import END_OF_TEXT, Tokenizer
from treadle.errors import ConfigError, TokenizerError
from treadle.generate import Decoder, Writer, bucket_lengths, start_ids
from treadle.models.gpt2 import GPT2
from treadle.train.checkpoint import load_checkpoint, save_checkpoint
from treadle.train.program import OptimizerSettings
from treadle.train.session import Session

CONTEXT = 16  # of SMALL


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned a little. No test changes it."""
    folder = tmp_path_factory.mktemp("trained")
    text = write_text(folder / "text.txt")
    settings = ("train.eval_every=20", "checkpoint.every=20", "checkpoint.keep=0")
    flags = (*SMALL, "--lr", 0.02, "--steps", 60, *(f"--set={setting}" for setting in settings))
    succeed("train", "--data", text, *flags, "--out", folder / "run")
    return folder / "run"


@pytest.fixture
def model(trained: Path) -> treadle.LanguageModel:
    return treadle.load(trained, threads=1)


def text_of(source: Path, *args: object) -> str:
    return succeed("generate", source, *args).removesuffix("\n")


# ---------------------------------------------------------------- drawing

LOGITS = np.array([0.5, 2.0, -1.0, 1.5, -np.inf, 0.0], np.float32)


def drawn(sampling: Sampling, logits: np.ndarray = LOGITS, count: int = 2000) -> np.ndarray:
    """How often each token is drawn."""
    tokens = [sampling.draw(logits, index) for index in range(count)]
    return np.bincount(tokens, minlength=len(logits)) / count


def softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max())
    return np.asarray(p / p.sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_are_the_softmax(temperature: float) -> None:
    found = drawn(Sampling(temperature))
    np.testing.assert_allclose(found, softmax(LOGITS / temperature), atol=0.04)
    assert found[4] == 0


def test_top_k_takes_the_k_best() -> None:
    found = drawn(Sampling(1.0, top_k=3))
    expected = softmax(np.where(np.isin(range(6), [1, 3, 0]), LOGITS, -np.inf))
    np.testing.assert_allclose(found, expected, atol=0.04)
    np.testing.assert_array_equal(drawn(Sampling(5.0, top_k=1), count=50), np.eye(6)[1])
    np.testing.assert_array_equal(
        drawn(Sampling(1.0, top_k=100), count=50), drawn(Sampling(1.0), count=50)
    )


def test_top_p_takes_the_fewest_that_reach_p() -> None:
    p = softmax(LOGITS)  # in order: tokens 1, 3, 0, 5, 2, 4
    assert p[1] < 0.6 < p[1] + p[3] < 0.9
    found = drawn(Sampling(1.0, top_p=0.6))
    expected = softmax(np.where(np.isin(range(6), [1, 3]), LOGITS, -np.inf))
    np.testing.assert_allclose(found, expected, atol=0.04)
    np.testing.assert_array_equal(drawn(Sampling(1.0, top_p=1e-9), count=50), np.eye(6)[1])
    nearly_all = float(np.nextafter(1.0, 0.0))
    np.testing.assert_array_equal(
        drawn(Sampling(1.0, top_p=nearly_all)), drawn(Sampling(1.0, top_p=1.0))
    )


def test_top_p_of_nearly_all_of_many_tokens() -> None:
    """The sum of the probabilities rounds, and must still reach p."""
    logits = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    sampling = Sampling(1.0, top_p=float(np.nextafter(1.0, 0.0)))
    assert all(0 <= sampling.draw(logits, index) < 50_000 for index in range(5))


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-310])
def test_failure_20_no_temperature_is_greedy(temperature: float) -> None:
    np.testing.assert_array_equal(drawn(Sampling(temperature), count=20), np.eye(6)[1])
    ties = np.array([1.0, 3.0, 3.0], np.float32)
    assert Sampling(0.0).draw(ties, 0) == Sampling(0.0, top_k=1).draw(ties, 0) == 1


def test_draws_depend_on_the_seed_and_the_place_alone() -> None:
    one, other = Sampling(1.0, seed=1), Sampling(1.0, seed=2)
    first = [one.draw(LOGITS, index) for index in range(40)]
    assert [one.draw(LOGITS, index) for index in reversed(range(40))] == first[::-1]
    assert [other.draw(LOGITS, index) for index in range(40)] != first


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_damaged_logits_are_told(bad: float) -> None:
    for sampling in (Sampling(0.0), Sampling(1.0)):
        with pytest.raises(ConfigError, match="not finite"):
            sampling.draw(np.array([0.0, bad, 1.0]), 0)
        with pytest.raises(ConfigError, match="not finite"):
            sampling.draw(np.full(3, -np.inf), 0)


# ---------------------------------------------------------------- the loop


class Scripted(Decoder):
    """A model with a context of 4 that wants the given tokens, one after the other."""

    def __init__(self, wanted: Sequence[int], vocab_size: int = 10) -> None:
        self.wanted = iter(wanted)
        self.vocab_size = vocab_size
        self.batch, self.block_size = 1, 4
        self.seen: list[list[int]] = []

    def logits(self, texts: Sequence[Sequence[int] | None]) -> np.ndarray:
        assert texts[0] is not None
        self.seen.append(list(texts[0][-self.block_size :]))
        return 9.0 * np.eye(self.vocab_size)[[next(self.wanted)]]


def written(model: Decoder, prompt: Sequence[int], tokens: int, **options: Any) -> list[int | None]:
    writer = Writer(model, [prompt], tokens, [Sampling(0.0)], **options)
    return [token for (token,) in writer]


@pytest.mark.parametrize(("prompt", "expected"), [(2, 3), (4, 1), (5, 0), (9, 0)])
def test_the_window_slides_and_that_is_said_once(prompt: int, expected: int) -> None:
    """Also where the prompt alone is longer than the context."""
    model = Scripted([5, 6, 7, 8, 9])
    said: list[int] = []
    ids = written(model, range(prompt), 5, on_window=lambda: said.append(len(model.seen)))
    assert ids == [5, 6, 7, 8, 9]
    assert said == [expected]
    whole = [*range(prompt), 5, 6, 7, 8]
    assert model.seen == [whole[: prompt + i][-4:] for i in range(5)]


def test_the_end_of_text_ends_it() -> None:
    model = Scripted([5, 3, 9, 4])
    assert written(model, [1], 4, stop_ids=[9]) == [5, 3]
    assert len(model.seen) == 3
    assert written(Scripted([5, 9]), [1], 2) == [5, 9]


def test_a_text_as_long_as_the_context_is_whole(model: treadle.LanguageModel) -> None:
    said: list[str] = []
    text = "".join(model.stream("the cat", CONTEXT - 7 + 1, Sampling(0.0), said.append))
    assert len(text) == CONTEXT - 7 + 1 and said == []


@pytest.mark.parametrize("length", [1, 5, CONTEXT - 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT])
def test_greedy_is_the_argmax_of_the_model(model: treadle.LanguageModel, length: int) -> None:
    """Against the loss of the training graphs, which say which next token is likeliest."""
    assert model.tokenizer is not None
    prompt = (3 * "the cat sat on a mat ")[:length]
    ids = model.tokenizer.encode(prompt)
    window = ids[-CONTEXT:]
    session = Session(model.model, NumpyBackend(), OptimizerSettings(), 1, len(window))
    session.load_weights(model.weights)
    losses = []
    for token in range(model.model.vocab_size):
        targets = np.full((1, len(window)), -1)
        targets[0, -1] = token
        losses.append(session.evaluate([(window[None], targets, 1)]))
    best = model.tokenizer.decode([int(np.argmin(losses))])
    assert model.generate(prompt, 1, temperature=0) == prompt + best
    assert model.generate(prompt, 1, temperature=2.0, top_k=1) == prompt + best


@pytest.mark.parametrize(("block_size", "lengths"), [(8, [8]), (16, [16]), (17, [16, 17]),
                                                     (100, [16, 32, 64, 100])])  # fmt: skip
def test_bucket_lengths(block_size: int, lengths: list[int]) -> None:
    assert bucket_lengths(block_size) == lengths


# ---------------------------------------------------------------- padding


@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (1.0, 0), (1.0, 5), (50.0, 0)])
def test_failure_9_padding_is_never_drawn(temperature: float, top_k: int) -> None:
    """A model whose vocabulary is larger than the tokenizer's, and that loves the ids beyond it."""
    tokenizer = Tokenizer.char("abc")
    sizes = GPT2(64, n_layer=1, n_head=1, n_embd=8, block_size=8, tie_embeddings=False)
    weights = {p.name: p.initial(0) for p in sizes.parameters()}
    for seed in range(3):
        loud = np.random.default_rng(seed).normal(scale=9.0, size=(61, 8))
        weights["lm_head.weight"][3:] = loud.astype(np.float32)
        lm = treadle.LanguageModel(sizes, tokenizer, weights, device="numpy")
        text = lm.generate("ab", 20, temperature=temperature, top_k=top_k)
        assert len(text) == 22 and set(text) <= set("abc")


def test_failure_9_a_padded_vocabulary_trains_and_samples(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    flags = (*SMALL, "--set", "model.vocab_size=64", "--set", "train.sample_every=2")
    said = succeed("train", "--data", text, *flags, "--steps", 4, "--out", tmp_path / "run")
    assert "sample at step 2" in said and "no sample" not in said
    assert treadle.load(tmp_path / "run", threads=1).model.vocab_size == 64
    written = text_of(tmp_path / "run", "--tokens", 300, "--temperature", 5)
    assert len(written) == 300 and set(written) <= set(text.read_text())


def test_a_prompt_of_another_vocabulary_is_refused(model: treadle.LanguageModel) -> None:
    other = treadle.LanguageModel(model.model, Tokenizer.byte(), model.weights, device="numpy")
    with pytest.raises(TokenizerError, match="token id 122, but the model's vocabulary has"):
        other.generate("z")


# ---------------------------------------------------------------- prompts


def test_failure_19_an_unknown_character_is_named(trained: Path) -> None:
    line = fail("generate", trained, "--prompt", "the café")
    assert "'é'" in line and "U+00E9" in line and "position 7" in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--temperature", "-0.5"), "temperature must be 0 or more, got -0.5"),
        (("--temperature", "nan"), "temperature must be 0 or more, got nan"),
        (("--top-k", "-1"), "top-k must be 0 (off) or more, got -1"),
        (("--top-p", "0"), "top-p must be above 0 and at most 1, got 0.0"),
        (("--top-p", "1.5"), "top-p must be above 0 and at most 1, got 1.5"),
    ],
)
def test_failure_20_values_out_of_range(trained: Path, args: tuple[str, str], message: str) -> None:
    assert message in fail("generate", trained, *args)


def test_failure_21_an_empty_prompt(trained: Path, model: treadle.LanguageModel) -> None:
    text = text_of(trained, "--tokens", 30)
    assert len(text) == 30
    assert model.tokenizer is not None and model.tokenizer.bos_id is None
    assert start_ids(model.tokenizer) == [0]
    assert start_ids(Tokenizer.char("a\nb")) == [0] and Tokenizer.char("a\nb").decode([0]) == "\n"
    assert start_ids(Tokenizer.byte()) == [256]


def test_failure_21_a_prompt_of_the_end_of_text_alone() -> None:
    tokenizer = Tokenizer.byte()
    sizes = GPT2(tokenizer.vocab_size, n_layer=1, n_head=1, n_embd=8, block_size=8)
    lm = treadle.LanguageModel(sizes, tokenizer, device="numpy")
    text = lm.generate(END_OF_TEXT, 12, seed=3)
    assert text.startswith(END_OF_TEXT) and len(text) > len(END_OF_TEXT)
    # It is what stands in for an empty prompt, so what follows is the same.
    assert text == END_OF_TEXT + lm.generate("", 12, seed=3)


def test_no_tokens_are_the_prompt(trained: Path) -> None:
    assert text_of(trained, "--prompt", "the cat", "--tokens", 0) == "the cat"


# ---------------------------------------------------------------- the command


def test_the_same_seed_writes_the_same_text(trained: Path) -> None:
    one, again, other = (
        text_of(trained, "--prompt", "the", "--tokens", 60, "--seed", seed) for seed in (5, 5, 6)
    )
    assert one == again != other
    assert one.startswith("the") and len(one) == 63


def test_greedy_needs_no_seed(trained: Path) -> None:
    greedy = ("--prompt", "the cat", "--tokens", 40)
    texts = {text_of(trained, *greedy, "--temperature", 0, "--seed", seed) for seed in (0, 1)}
    texts.add(text_of(trained, *greedy, "--temperature", 9, "--top-k", 1))
    texts.add(text_of(trained, *greedy, "--top-p", 1e-9))
    texts.add(text_of(trained, *greedy, "--temperature", 0, "--device", "numpy"))
    assert len(texts) == 1


def test_past_the_context_is_said_once(trained: Path) -> None:
    result = run("generate", trained, "--prompt", "the cat", "--tokens", 3 * CONTEXT)
    assert result.code == 0 and len(result.out) == 7 + 3 * CONTEXT + 1
    assert result.err.count("longer than the context: the last 16 tokens count") == 1
    long = 2 * "the cat sat on a mat "
    assert "the last 16 tokens" in run("generate", trained, "--prompt", long, "--tokens", 2).err
    assert "context" not in run("generate", trained, "--prompt", "the", "--tokens", 3).err


def test_a_run_means_its_best_checkpoint(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(trained, copy)
    first = checkpoint(copy, 20)
    old = load_checkpoint(first)
    assert old.state is not None
    save_checkpoint(
        first, config=old.config, tensors=old.tensors, optimizer=old.optimizer,
        tokenizer_json=old.tokenizer_json, tokenizer_config=old.tokenizer_config,
        state=old.state | {"val_loss": 0.01},
    )  # fmt: skip
    args = ("--prompt", "the ", "--tokens", 60, "--seed", 2)
    best, newest = text_of(checkpoint(trained, 20), *args), text_of(checkpoint(trained, 60), *args)
    assert best != newest
    assert text_of(copy, *args) == best
    data = (first / "model.safetensors").read_bytes()
    (first / "model.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    result = run("generate", copy, *args)
    assert result.code == 0 and "the best checkpoint cannot be used" in result.err


def test_one_file_is_enough(trained: Path, tmp_path: Path) -> None:
    args = ("--prompt", "the ", "--tokens", 40, "--seed", 2)
    source = checkpoint(trained, 60)
    alone = tmp_path / "any name.safetensors"
    shutil.copy(source / "model.safetensors", alone)
    assert text_of(alone, *args) == text_of(source, *args)


def test_without_a_tokenizer_one_is_given(trained: Path, tmp_path: Path) -> None:
    source = treadle.load(checkpoint(trained, 60), threads=1)
    source.tokenizer = None
    source.save(tmp_path / "bare")
    line = fail("generate", tmp_path / "bare")
    assert "--tokenizer" in line and "--vocab" in line
    args = ("--prompt", "the ", "--tokens", 30, "--seed", 2)
    expected = text_of(checkpoint(trained, 60), *args)
    given = checkpoint(trained, 60)
    assert text_of(tmp_path / "bare", *args, "--tokenizer", given / "tokenizer.json") == expected
    assert text_of(tmp_path / "bare", *args, "--tokenizer", given) == expected


def test_vocab_and_merges_serve_as_a_tokenizer(tmp_path: Path) -> None:
    spec = json.loads(Tokenizer.train_bpe(["the cat sat on the mat " * 20], 270).to_json())
    (tmp_path / "vocab.json").write_text(json.dumps(spec["model"]["vocab"]))
    merges = [" ".join(m) if isinstance(m, list) else m for m in spec["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    size = len(spec["model"]["vocab"])
    treadle.LanguageModel(
        GPT2(size, n_layer=1, n_head=1, n_embd=8, block_size=8), device="numpy"
    ).save(tmp_path / "bare")
    files = ("--vocab", tmp_path / "vocab.json", "--merges", tmp_path / "merges.txt")
    written = text_of(tmp_path / "bare", "--prompt", "the cat", "--tokens", 5, *files)
    assert written.startswith("the cat")


def test_what_is_no_model_is_refused(tmp_path: Path, trained: Path) -> None:
    assert str(tmp_path / "nothing") in fail("generate", tmp_path / "nothing")
    (tmp_path / "checkpoints").mkdir()
    assert "no checkpoint yet" in fail("generate", tmp_path)
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes((checkpoint(trained, 60) / "model.safetensors").read_bytes()[:-7])
    assert str(bad) in fail("generate", bad)


# ---------------------------------------------------------------- streaming


def test_streams_whole_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte model writes bytes; what it streams grows by whole characters, and none is lost."""
    spanish = "«¿Qué año?», pidió el niño… 🦙"
    data = spanish.encode()
    sizes = GPT2(257, n_layer=1, n_head=1, n_embd=8, block_size=4)
    lm = treadle.LanguageModel(sizes, Tokenizer.byte(), device="numpy")

    def pieces(tokens: int) -> list[str]:
        monkeypatch.setattr(lm, "_decoder_of", lambda *_: Scripted(data, 257))
        return list(lm.stream("ñ", tokens, Sampling(0.0)))

    assert pieces(len(data)) == list(spanish)
    for tokens in range(len(data)):
        whole = data[:tokens].decode(errors="ignore")
        broken = len(whole.encode()) < tokens  # it ends in the middle of a character
        assert pieces(tokens) == [*whole, *(["\ufffd"] if broken else [])]


def test_the_end_of_text_is_learned(tmp_path: Path) -> None:
    """Documents of a directory are parted by it, and a text that reaches it is over."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text("one two three.")
    corpus = treadle.load_data(folder, "byte")
    sizes = GPT2(corpus.vocab_size, n_layer=1, n_head=2, n_embd=32, block_size=16)
    lm = treadle.LanguageModel(sizes, corpus.tokenizer, threads=1)
    lm.fit(corpus, 150, batch_size=8, lr=1e-2, progress=False)
    assert lm.generate("one ", 100, temperature=0) == "one two three."
    assert lm.generate("", 100, temperature=0) == "one two three."


def test_fit_tells_its_progress_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = treadle.load_data(write_text(tmp_path / "text.txt"), "char")
    sizes = GPT2(data.vocab_size, n_layer=1, n_head=2, n_embd=16, block_size=16)
    lm = treadle.LanguageModel(sizes, data.tokenizer, threads=1, device="numpy")
    seen: list[int] = []
    lm.fit(data, 25, batch_size=2, on_step=lambda step, loss: seen.append(step))
    out, err = capsys.readouterr()
    assert out == "" and seen == list(range(1, 26))
    assert re.findall(r"^step +(\d+)/25  loss \d", err, re.M) == ["10", "20", "25"]
    lm.fit(data, 25, batch_size=2, progress=False)
    assert capsys.readouterr() == ("", "")
    size = f"{sizes.n_parameters():,}"
    assert repr(lm) == f"LanguageModel(gpt2, {size} parameters, char tokenizer, numpy)"


def test_a_model_with_a_dropout_samples_without_it(trained: Path) -> None:
    model = treadle.load(trained, threads=1)
    assert isinstance(model.model, GPT2)
    with_dropout = replace(model.model, dropout=0.9)
    same = treadle.LanguageModel(with_dropout, model.tokenizer, model.weights, threads=1)
    text = model.generate("the", 30, temperature=0)
    assert same.generate("the", 30, temperature=0) == text
