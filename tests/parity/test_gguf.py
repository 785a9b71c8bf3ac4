"""GGUF files of models trained here, read by transformers: our logits and our texts.

What transformers' reader leaves out of a file (the context of a GPT-2, scaling of rotary
frequencies, soft caps) it is told here; it has no GGUF reader for the first Gemma, whose tensors
are taken out of the file one by one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.api import LanguageModel, load_data
from treadle.data.stories import generate_stories
from treadle.data.tokenizer import Tokenizer
from treadle.graph.program import Program
from treadle.interop.gguf import write_gguf
from treadle.models.base import Model, declare, read_weights
from treadle.models.gemma import Gemma
from treadle.models.gpt2 import GPT2
from treadle.models.llama import Llama
from treadle.models.llama_config import RopeScaling

pytestmark = pytest.mark.parity

V, CONTEXT, STEPS, NEW = 500, 64, 60, 32
PROMPT = "Once upon a time"
SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 64, "block_size": CONTEXT}
SMALL = SIZES | {"n_kv_head": 2, "n_ff": 96}
LLAMA3 = RopeScaling(8.0, 1.0, 4.0, original_max_position_embeddings=16)
CAPS = {"attn_softcap": 2.0, "final_softcap": 5.0}
MODELS: dict[str, Model] = {
    "gpt2": GPT2(V, **SIZES),
    "gpt2 without biases": GPT2(V, **SIZES, bias=False, tie_embeddings=False),
    "llama": Llama(V, **SMALL),
    "llama 3.1": Llama(V, **SMALL, rope_scaling=LLAMA3, rope_theta=5e5, tie_embeddings=False),
    "llama, linear": Llama(V, **SMALL, head_dim=32, rope_scaling=RopeScaling(4.0, kind="linear")),
    "gemma 2": Gemma(V, **SMALL, version=2, sliding_window=8, query_pre_attn_scalar=50, **CAPS),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "stories.txt"
    path.write_text(generate_stories("en", 300), encoding="utf-8")
    return path


def trained(model: Model, text: Path) -> LanguageModel:
    data = load_data(text, tokenizer="bpe", vocab_size=V)
    ours = LanguageModel(model, data.tokenizer)
    ours.fit(data, STEPS, batch_size=8, lr=3e-3, progress=False)
    return ours


def logits_of(ours: LanguageModel, ids: list[int]) -> np.ndarray:
    """Logits [T, V] after each of the ids."""
    program, model = Program(), ours.model
    declare(program, model)
    g = program.graph("logits")
    weights = read_weights(program, g, model)
    tokens = g.read(program.buffer("tokens", (1, len(ids)), "int32", "input"))
    logits = model.logits(weights, model.hidden(weights, tokens))
    g.assign(program.buffer("logits", (1, len(ids), model.vocab_size), "float32", "output"), logits)
    executable = ours.backend.load(program)
    for name, array in ours.weights.items():
        executable.write(name, array)
    executable.write("tokens", np.array([ids], np.int32))
    executable.run("logits")
    return executable.read("logits")[0]


def told(model: Model) -> dict[str, Any]:
    """What transformers' reader leaves out of a file."""
    config = model.hf_config(None)
    if isinstance(model, GPT2):
        return {"n_positions": model.block_size}
    found = {}
    if config.get("rope_scaling"):
        theta = {"rope_theta": config["rope_theta"]}
        found["rope_parameters"] = theta | config["rope_scaling"]
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in config:
            found[key] = config[key]
    if "query_pre_attn_scalar" in config:  # which the file holds in the queries' weights
        found["query_pre_attn_scalar"] = config["head_dim"]
    return found


def compare(theirs: Any, ours: LanguageModel, limit: float) -> None:
    import torch

    assert isinstance(ours.tokenizer, Tokenizer)
    ids = [int(i) for i in ours.tokenizer.encode(generate_stories("en", 1))][:CONTEXT]
    expected = logits_of(ours, ids)
    with torch.no_grad():
        found = theirs(torch.tensor([ids])).logits[0].numpy()
    difference = float(np.abs(found - expected).max())
    print(f"logits up to {np.abs(expected).max():.3f}, largest difference {difference:.2e}")
    assert difference <= limit


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trained_here(name: str, text: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours, folder = trained(MODELS[name], text), tmp_path
    assert ours.tokenizer is not None
    # float32 to rounding; float16 and q8_0 to what their numbers are rounded to.
    for dtype, limit in (("fp32", 1e-4), ("fp16", 4e-3), ("q8_0", 8e-2)):
        notes = write_gguf(folder / "m.gguf", ours.model, ours.weights, ours.tokenizer, dtype)
        assert notes == []
        theirs = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file="m.gguf", dtype=torch.float32,
            attn_implementation="eager", **told(ours.model),
        )  # fmt: skip
        compare(theirs, ours, limit)
        if dtype != "fp32":
            continue
        words = AutoTokenizer.from_pretrained(folder, gguf_file="m.gguf")
        sample = generate_stories("en", 3) + "<|endoftext|>ñ\n\n 12 it's"
        assert words(sample)["input_ids"] == ours.tokenizer.encode(sample).tolist()
        prompt = torch.tensor([words(PROMPT)["input_ids"]])
        written = theirs.generate(prompt, max_new_tokens=NEW, do_sample=False)
        expected = ours.generate(PROMPT, tokens=NEW, temperature=0.0)
        assert words.decode(written[0], skip_special_tokens=True) == expected


def test_the_first_gemma(text: Path, tmp_path: Path) -> None:
    import gguf
    import torch
    from transformers import GemmaConfig, GemmaForCausalLM

    ours = trained(Gemma(V, **SMALL), text)
    write_gguf(tmp_path / "m.gguf", ours.model, ours.weights, ours.tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA, 2)
    stored = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    theirs = GemmaForCausalLM(GemmaConfig(**ours.model.hf_config(None))).eval()
    tensors = {}
    for name in theirs.state_dict():
        if name == "lm_head.weight":
            continue
        array = stored.pop(f"{names.get_name(name.removesuffix('.weight'))}.weight")
        if name.endswith("norm.weight"):
            array = array - 1
        tensors[name] = torch.from_numpy(np.array(array))
    assert not stored
    theirs.load_state_dict(tensors, strict=False)
    theirs.tie_weights()
    compare(theirs, ours, 1e-4)
