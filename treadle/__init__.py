"""Treadle trains small language models from scratch on the machine you have.

    import treadle

    data = treadle.load_data("corpus.txt", tokenizer="char")
    model = treadle.GPT2(vocab_size=data.vocab_size, n_layer=4, n_head=4, n_embd=128, block_size=64)
    lm = treadle.LanguageModel(model, data.tokenizer)
    lm.fit(data, steps=500)
    lm.save("my-model")
    print(treadle.load("my-model").generate("Once", tokens=100))

Names are loaded when they are first used, so that importing the package costs little.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name: the module that defines it.
_PUBLIC = {
    "Config": "treadle.config",
    "GPT2": "treadle.models.gpt2",
    "Gemma": "treadle.models.gemma",
    "Graph": "treadle.graph",
    "LanguageModel": "treadle.api",
    "Llama": "treadle.models.llama",
    "OptimizerSettings": "treadle.train.program",
    "Program": "treadle.graph",
    "Sampling": "treadle.generate",
    "Session": "treadle.train.session",
    "Tokenizer": "treadle.data.tokenizer",
    "TreadleError": "treadle.errors",
    "compile": "treadle.api",
    "gradients": "treadle.graph",
    "load": "treadle.api",
    "load_config": "treadle.config",
    "load_data": "treadle.api",
    "ops": "",
    "train": "",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'treadle' has no attribute {name!r}")
    module = _PUBLIC[name]
    return getattr(import_module(module), name) if module else import_module(f"treadle.{name}")


def __dir__() -> list[str]:
    return __all__
