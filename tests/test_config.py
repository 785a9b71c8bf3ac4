"""Configuration: keys, errors of one line, precedence, and the sizes that follow the corpus."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from treadle import config as configs
from treadle.config import Config, ModelConfig, fill_from_corpus, load_config
from treadle.errors import ConfigError

KEYS = [
    "model.architecture",
    "model.vocab_size",
    "model.n_layer",
    "model.n_head",
    "model.n_embd",
    "model.block_size",
    "model.bias",
    "model.dropout",
    "model.tie_embeddings",
    "model.n_kv_head",
    "model.head_dim",
    "model.n_ff",
    "model.norm_eps",
    "model.rope_theta",
    "model.rope_scaling",
    "model.version",
    "model.attn_softcap",
    "model.final_softcap",
    "model.query_pre_attn_scalar",
    "model.sliding_window",
    "data.path",
    "data.tokenizer",
    "data.vocab_path",
    "data.merges_path",
    "data.vocab_size",
    "data.val_fraction",
    "train.steps",
    "train.batch_size",
    "train.window",
    "train.grad_accum",
    "train.init_from",
    "train.seed",
    "train.device",
    "train.threads",
    "train.precision",
    "train.recompute",
    "train.deterministic",
    "train.eval_every",
    "train.eval_batches",
    "train.sample_every",
    "train.on_nonfinite",
    "train.on_spike",
    "train.spike_window",
    "train.spike_zscore",
    "train.rank_timeout",
    "train.tensorboard",
    "optimizer.name",
    "optimizer.lr",
    "optimizer.betas",
    "optimizer.eps",
    "optimizer.weight_decay",
    "optimizer.momentum",
    "optimizer.grad_clip",
    "schedule.name",
    "schedule.warmup_steps",
    "schedule.min_lr",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.keep_every",
]


def value(config: Config, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_the_keys_are_the_interface():
    table = configs.key_table()
    assert [row.name for row in table] == KEYS
    assert all(row.description.endswith(".") and row.type for row in table)
    assert configs.RESUMABLE_KEYS.issubset(KEYS)


def test_defaults_survive_a_round_trip(tmp_path: Path):
    path = tmp_path / "config.json"
    config = load_config(None)
    configs.dump_config(config, path)
    assert load_config(path) == config
    assert path.read_text() == configs.dumps_config(load_config(path))
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_flags_win_over_set_and_set_over_the_file(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text('{"$schema": "x", "train": {"steps": 1, "seed": 1, "batch_size": 1}}')
    flags = {"train.steps": 3, "model.n_layer": None}
    config = load_config(path, ["train.steps=2", "train.seed=2"], flags)
    assert (config.train.steps, config.train.seed, config.train.batch_size) == (3, 2, 1)


@pytest.mark.parametrize(
    ("override", "key", "expected"),
    [
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("train.steps=1e3", "train.steps", 1000),
        ("optimizer.betas=[0, 0.5]", "optimizer.betas", (0.0, 0.5)),
        ("data.path=2024", "data.path", "2024"),
        ("data.path=a=b.txt", "data.path", "a=b.txt"),
        ("data.path=null", "data.path", None),
        ("model.bias=false", "model.bias", False),
        ("train.device=opencl:1", "train.device", "opencl:1"),
        ("train.device=opencl:Intel(R) Arc", "train.device", "opencl:Intel(R) Arc"),
        ("train.device=cuda:0", "train.device", "cuda:0"),
        ("data.tokenizer=some/tokenizer.json", "data.tokenizer", "some/tokenizer.json"),
    ],
)
def test_values_that_are_taken(override: str, key: str, expected: object):
    got = value(load_config(None, [override]), key)
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.steps=-4", ["train.steps", "-4", "integer from 0 to 2^32 - 1 or null"]),
        ("train.steps=1.5", ["train.steps", "1.5", "integer"]),
        ("train.steps=true", ["train.steps", "true", "integer"]),
        ("train.batch_size=many", ["train.batch_size", '"many"', "integer >= 1"]),
        ("model.bias=1", ["model.bias", "1", "true or false"]),
        ("model.dropout=1", ["model.dropout", "number >= 0 and < 1"]),
        ("model.rope_scaling=8", ["model.rope_scaling", "8", '"factor"', "null"]),
        ('model.rope_scaling={"factor": "8"}', ["model.rope_scaling", '"factor"']),
        ('model.rope_scaling={"factor": 8, "faktor": 8}', ["model.rope_scaling", '"factor"']),
        ("optimizer.lr=NaN", ["optimizer.lr", "NaN", "number > 0"]),
        ("optimizer.lr=0", ["optimizer.lr", "0", "number > 0"]),
        ("optimizer.betas=[0.9]", ["optimizer.betas", "[0.9]", "two numbers"]),
        ("optimizer.betas=[0.9, 1]", ["optimizer.betas", "[0.9, 1]", "< 1"]),
        ("optimizer.name=adam", ["optimizer.name", '"adam"', '"adamw", "sgd"']),
        ("train.precision=fp8", ["train.precision", '"fp8"', '"fp32"', "not available yet"]),
        ("train.device=tpu", ["train.device", '"tpu"', '"cuda[:N]"']),
        ("train.device=cuda:x", ["train.device", '"cuda:x"']),
        ("train.seed=9223372036854775808", ["train.seed", "2^63 - 1"]),
        ("model.architecture=rnn", ["model.architecture", '"rnn"', '"gpt2"']),
        ("data.tokenizer=bep", ["data.tokenizer", '"bep"', '"bpe"', "tokenizer.json"]),
        ("data.val_fraction=0.9", ["data.val_fraction", "0.9", "<= 0.5"]),
        ("train.steps", ["KEY=VALUE"]),
        ("model=3", ["model is a section", "model.architecture"]),
    ],
)
def test_values_that_are_refused(override: str, parts: list[str]):
    line = refused(override)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("train.batchsize", "train.batch_size"),
        ("n_layer", "model.n_layer"),
        ("lr", "optimizer.lr"),
        ("train.lr", "optimizer.lr"),
        ("optimizer.beta", "optimizer.betas"),
        ("model.n_heads", "model.n_head"),
    ],
)
def test_an_unknown_key_gets_a_suggestion(wrong: str, meant: str, tmp_path: Path):
    assert refused(f"{wrong}=3") == f'unknown key {wrong}; did you mean "{meant}"?'
    section, _, name = wrong.rpartition(".")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({section: {name: 3}} if section else {name: 3}))
    with pytest.raises(ConfigError, match=f'did you mean "{meant}"'):
        load_config(path)


def test_an_unknown_section_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r'unknown key trian; did you mean "train"'):
        Config(trian={"steps": 3})
    assert refused("trian.steps=3").endswith('did you mean "train.steps"?')


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"train": }', ["line 1 column 11"]),
        ('{"train": 3}', ["train", "3", "train.steps"]),
        ("[]", ["object"]),
        ('{"train": {"steps": 1, "steps": 2}}', ["steps", "twice"]),
        (b"\xff", ["UTF-8", "byte 0"]),
    ],
)
def test_a_bad_file_is_one_line(text: str | bytes, parts: list[str], tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert all(part in str(caught.value) for part in parts) and "\n" not in str(caught.value)


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"nowhere.json"):
        load_config("nowhere.json")


def test_python_callers_get_the_same_errors():
    with pytest.raises(ConfigError, match=r"model.n_layer: got 0"):
        ModelConfig(n_layer=0)
    with pytest.raises(ConfigError, match=r'unknown key model.layers.*"model.n_layer"'):
        Config(model={"layers": 1})


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["model.n_embd=100", "model.n_head=3"], ["model.n_embd", "100", "n_head 2"]),
        (["train.batch_size=12", "train.grad_accum=5"], ["train.grad_accum", "5", "12", "is 4"]),
        (["train.steps=10", "schedule.warmup_steps=11"], ["schedule.warmup_steps", "11", "10"]),
        (["optimizer.lr=0.1", "schedule.min_lr=1"], ["schedule.min_lr", "0.1"]),
        (["data.vocab_path=v.json"], ["data.vocab_path", "data.merges_path"]),
        (["data.merges_path=m.txt"], ["data.merges_path", "data.vocab_path"]),
        (
            ["data.vocab_path=v", "data.merges_path=m", "data.tokenizer=bpe"],
            ["data.tokenizer", "data.vocab_path"],
        ),
        (["data.tokenizer=char", "data.vocab_size=500"], ["data.vocab_size", "BPE"]),
        (["data.vocab_size=256"], ["data.vocab_size", "256", "257"]),
        (["model.n_kv_head=2"], ["model.n_kv_head", "does not apply to gpt2", "llama and gemma"]),
        (["model.architecture=llama", "model.dropout=0.1"], ["model.dropout", "llama", "gpt2"]),
        (["model.architecture=llama", "model.version=2"], ["model.version", "llama", "gemma"]),
        (["model.architecture=gemma", "model.attn_softcap=50"], ["model.attn_softcap", "version"]),
        (
            ["model.architecture=llama", "model.n_head=6", "model.n_kv_head=4"],
            ["model.n_kv_head", "4", "6", "is 3"],
        ),
        (["model.architecture=llama", "model.head_dim=7"], ["model.head_dim", "7", "even"]),
    ],
)
def test_combinations_that_cannot_work(overrides: list[str], parts: list[str]):
    line = refused(*overrides)
    assert all(part in line for part in parts), line


def test_schema_validates_the_keys():
    schema = configs.json_schema()
    json.dumps(schema)
    assert "$schema" in schema["properties"]
    definitions = schema["$defs"]
    for key in KEYS:
        section, name = key.split(".")
        reference = schema["properties"][section]["$ref"].rpartition("/")[2]
        assert "description" in definitions[reference]["properties"][name], key
        assert definitions[reference]["additionalProperties"] is False
    assert definitions["TrainConfig"]["properties"]["precision"]["enum"] == ["fp32", "bf16", "tf32"]


def test_differences_are_listed_by_key():
    a = load_config(None, ["train.steps=1"])
    b = load_config(None, ["train.steps=2", "model.bias=false"])
    assert configs.diff_configs(a, b) == [("model.bias", True, False), ("train.steps", 1, 2)]
    assert configs.diff_configs(a, a) == []


def test_resuming_inherits_what_was_not_given():
    saved = fill_from_corpus(load_config(None, ["model.dropout=0.1", "train.steps=50"]), 1000)
    again = configs.inherit(load_config(None, ["train.steps=80"]), saved)
    assert configs.diff_configs(saved, again) == [("train.steps", 50, 80)]
    nulls = configs.inherit(load_config(None, ["model.n_layer=null"]), saved)
    assert configs.diff_configs(saved, nulls) == []


# ---- sizes that follow the corpus -----------------------------------------------------------

FOLLOWING = {
    "model.n_layer",
    "model.n_head",
    "model.n_embd",
    "model.block_size",
    "train.steps",
    "train.batch_size",
    "optimizer.lr",
    "schedule.warmup_steps",
    "schedule.min_lr",
}


@pytest.mark.parametrize("corpus_bytes", [1, 50_000, 10**6, 10**7, 10**9])
def test_every_null_that_follows_the_corpus_is_filled(corpus_bytes: int):
    config = fill_from_corpus(load_config(None), corpus_bytes)
    assert all(value(config, key) is not None for key in FOLLOWING)
    assert config.data.tokenizer in ("char", "bpe")
    assert (config.data.vocab_size is None) == (config.data.tokenizer == "char")


def test_larger_corpora_get_larger_models():
    bounds = [size.max_bytes for size in configs.SIZES]
    assert bounds == sorted(set(bounds)) and bounds[-1] == float("inf")
    for name in ("n_layer", "n_embd", "block_size", "steps", "vocab_size"):
        column = [getattr(size, name) for size in configs.SIZES]
        assert column == sorted(column), name
    assert len(configs.size_table()) == len(configs.SIZES)


def test_given_values_are_never_touched():
    given = {
        "model.n_layer": 1,
        "model.n_embd": 90,
        "train.batch_size": 7,
        "optimizer.lr": 0.5,
        "schedule.warmup_steps": 3,
    }
    config = fill_from_corpus(load_config(None, (), given), 10**6)
    assert {key: value(config, key) for key in given} == given
    assert 90 % value(config, "model.n_head") == 0


def test_filled_values_fit_the_given_ones():
    config = fill_from_corpus(load_config(None, ["model.n_head=3", "train.grad_accum=5"]), 10**6)
    assert config.model.n_embd % 3 == 0 and config.train.batch_size % 5 == 0
    asked_for_a_size = fill_from_corpus(load_config(None, ["data.vocab_size=300"]), 1000)
    assert asked_for_a_size.data.tokenizer == "bpe"
    short = fill_from_corpus(load_config(None, ["train.steps=5"]), 10**6)
    assert short.schedule.warmup_steps == 0
    with pytest.raises(ConfigError, match=r"schedule.min_lr"):
        fill_from_corpus(load_config(None, ["schedule.min_lr=1"]), 10**6)
