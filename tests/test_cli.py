"""The command line: every command, what it says when something is wrong, and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

import treadle
from treadle import checks
from treadle.backends import cpu
from treadle.cases import Case, all_cases
from treadle.cli import COMMANDS, main, tables
from treadle.cli import check as check_command
from treadle.cli import config as config_command
from treadle.cli import demo as demo_command
from treadle.cli import profile as profile_command
from treadle.cli import trial as trial_module
from treadle.cli.tables import table
from treadle.config import key_table, load_config, size_table, to_dict

ROOT = Path(__file__).resolve().parents[1]
SIZES = (
    *("--n-layer", "1", "--n-head", "2", "--n-embd", "16", "--block-size", "16"),
    *("--batch-size", "4", "--threads", "1"),
)
RANDOM = (*SIZES, "--set", "model.vocab_size=40")  # a model without data


@dataclass
class Result:
    """What a command did."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*args: object) -> Result:
        capsys.readouterr()
        code = main([str(a) for a in args])
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture(autouse=True)
def _inside_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 40, encoding="utf-8")
    return path


def process(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "treadle", *map(str, args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def assert_refused(result: Result, *words: str) -> None:
    """Exit code 2, and one line that names the fault; nothing else is said."""
    assert result.code == 2, result
    assert result.err.startswith("treadle: error: "), result
    assert result.err.count("\n") == 1 and result.err.endswith("\n"), result
    assert "Traceback" not in result.err
    for word in words:
        assert word in result.err


# ---------------------------------------------------------------- the command itself


def test_help_lists_all_commands(run: Run) -> None:
    shown = run("--help")
    assert shown.code == 0 and shown.err == ""
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", shown.out, re.MULTILINE)
    assert run().out == shown.out


@pytest.mark.parametrize("name", list(COMMANDS))
def test_each_command_explains_itself(run: Run, name: str) -> None:
    shown = run(name, "--help")
    assert shown.code == 0
    assert f"Usage: treadle {name} " in shown.out
    assert "--help" in shown.out


def test_version(run: Run) -> None:
    assert run("--version") == Result(0, f"treadle {treadle.__version__}\n", "")


def test_help_imports_no_command_and_nothing_heavy() -> None:
    code = (
        "import sys; from treadle.cli import main; main(['--help'])\n"
        "print([m for m in sys.modules if m in ('numpy', 'tokenizers') or"
        " m.startswith('treadle.') and m != 'treadle.cli'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "args, words",
    [
        (["nonsense"], ["nonsense"]),
        (["--nonsense"], ["--nonsense"]),
        (["train", "--nonsense"], ["--nonsense", "treadle train --help"]),
        (["train", "--steps", "many"], ["--steps"]),
        (["train", "--steps"], ["--steps"]),
        (["train"], ["data.path"]),
        (["train", "--data", "nowhere.txt"], ["nowhere.txt"]),
        (["train", "nowhere.json"], ["nowhere.json"]),
        (["train", "--data", "fox.txt", "--out", "fox.txt"], ["fox.txt is a file"]),
        (["train", "fox.txt"], ["not JSON", "--data fox.txt"]),
        (["train", "--data", "fox.txt", "--lr", "-1"], ["optimizer.lr", "-1"]),
        (["train", "--data", "fox.txt", "--set", "train.step=1"], ["train.steps"]),
        (["train", "--data", "fox.txt", "--set", "train.steps"], ["KEY=VALUE"]),
        (["train", "--data", "fox.txt", "--n-embd", "10", "--n-head", "3"], ["n_head"]),
        (["train", "--data", "fox.txt", "--device", "abacus"], ["train.device", "abacus"]),
        (["train", "--data", "fox.txt", "--block-size", "5000"], ["5000"]),
        (["train", "--data", "fox.txt", "--init-from", "nowhere"], ["nowhere"]),
        (["train", "--data", "fox.txt", "--resume", "nowhere"], ["nowhere"]),
        (["generate"], ["RUN"]),
        (["generate", "nowhere"], ["nowhere"]),
        (["generate", "fox.txt"], ["fox.txt"]),
        (["generate", "nowhere", "--temperature", "-1"], ["temperature", "-1"]),
        (["generate", "nowhere", "--top-p", "0"], ["top-p"]),
        (["generate", "nowhere", "--tokens", "-1"], ["--tokens"]),
        (["plan"], ["--data", "--set model.vocab_size=65", "train.batch_size"]),
        (["plan", *RANDOM, "--graph", "nothing", "--print"], ["nothing", "micro_first"]),
        (["plan", *RANDOM, "--draw", "no/where.svg"], ["where.svg"]),
        (["profile", *RANDOM, "--steps", "0"], ["--steps"]),
        (["profile", "--n-layer", "2"], ["model.n_head"]),
        (["check", "--device", "abacus"], ["abacus"]),
        (["check", "--threads", "0"], ["--threads"]),
        (["config", "--nonsense"], ["--nonsense"]),
        (["demo", "--language", "tlh"], ["tlh", "en"]),
        (["demo", "--seed", "-1"], ["--seed"]),
        (["demo", "--out", "fox.txt"], ["fox.txt"]),
    ],
    ids=lambda value: " ".join(value[:5]) if isinstance(value, list) else None,
)
def test_what_cannot_work_is_told_in_one_line(
    run: Run, text: Path, args: list[str], words: list[str]
) -> None:
    if args[0] == "train" and "--init-from" in args:
        args = [*args, *SIZES]
    assert_refused(run(*args), *words)


def test_errors_in_a_process_of_their_own() -> None:
    done = process("train", "--data", "nowhere.txt")
    assert_refused(Result(done.returncode, done.stdout, done.stderr), "nowhere.txt")
    done = process("plan", "--steps", "x")
    assert_refused(Result(done.returncode, done.stdout, done.stderr), "--steps")


def test_debug_shows_the_traceback() -> None:
    done = process("generate", "nowhere", "--debug")
    assert done.returncode != 0
    assert "Traceback" in done.stderr and "CheckpointError" in done.stderr


def test_a_fault_of_ours_is_one_line_and_exit_code_1(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_module, "resolve", lambda config: 1 / 0)
    result = run("plan", "--data", "fox.txt")
    assert result.code == 1
    assert result.err.startswith("treadle: internal error: ZeroDivisionError: ")
    assert result.err.count("\n") == 1
    with pytest.raises(ZeroDivisionError):
        run("plan", "--data", "fox.txt", "--debug")


# ---------------------------------------------------------------- tables


def test_columns_are_aligned() -> None:
    text = table([("a", 1, "x"), ("long", 1000, "")], ("name", "n", "note"))
    assert text == "name     n  note\n----  ----  ----\na        1     x\nlong  1000"


@pytest.mark.parametrize("args", [("config",), ("config", "--sizes")], ids=" ".join)
def test_tables_fit_the_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    whole = run(*args).out
    assert max(map(len, whole.splitlines())) > 80
    monkeypatch.setattr(tables, "terminal_width", lambda: 80)
    monkeypatch.setattr(config_command, "terminal_width", lambda: 80)
    narrow = run(*args).out
    assert max(map(len, narrow.splitlines())) <= 80
    assert sorted(re.findall("[^ \n-]+", narrow)) == sorted(re.findall("[^ \n-]+", whole))


# ---------------------------------------------------------------- train and generate


def test_train_then_generate(run: Run, text: Path) -> None:
    trained = run("train", "--data", text, *SIZES, "--tokenizer", "char", "--steps", 3)
    assert trained.code == 0, trained
    assert "3/3" in trained.out and "treadle generate" in trained.out
    assert (Path("runs/fox") / "checkpoints/step-00000003/model.safetensors").is_file()

    written = run("generate", "runs/fox", "--prompt", "the ", "--tokens", 12, "--seed", 4)
    assert written.code == 0
    assert written.out.startswith("the ") and len(written.out) == len("the ") + 12 + 1
    again = run("generate", "runs/fox", "--prompt", "the ", "--tokens", 12, "--seed", 4)
    assert again.out == written.out
    other = run("generate", "runs/fox", "--prompt", "the ", "--tokens", 12, "--seed", 5)
    assert other.out != written.out
    unknown = run("generate", "runs/fox", "--prompt", "the Ω")
    assert_refused(unknown, "Ω")
    assert unknown.out == ""
    assert_refused(run("generate", "runs/fox", "--prompt", "the\r\n"), r"'\n'")
    assert_refused(run("generate", "runs"), "name one of them", "runs/fox")
    assert_refused(run("generate", "runs/fox/run.json"), "run.json", "is not a model")
    greedy = ("--tokens", 30, "--temperature", 0, "--prompt", "fox")
    long = run("generate", "runs/fox", *greedy)
    assert "the last 16 tokens count" in long.err and long.err.count("\n") == 1
    single = run("generate", "runs/fox/checkpoints/step-00000003/model.safetensors", *greedy)
    assert single.out == long.out


def test_generated_text_cannot_steer_a_terminal(
    run: Run, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import treadle.api
    import treadle.train.report

    run("train", "--data", text, *SIZES, "--tokenizer", "char", "--steps", 1)
    monkeypatch.setattr(treadle.api.LanguageModel, "stream", lambda *args, **kw: iter(["\x1b[2J"]))
    assert run("generate", "runs/fox").out == "\x1b[2J\n"
    monkeypatch.setattr(treadle.train.report, "is_terminal", lambda stream: True)
    assert run("generate", "runs/fox").out == "\\x1b[2J\n"


def test_write_config_comes_back(run: Run, text: Path, tmp_path: Path) -> None:
    flags = (*SIZES, "--tokenizer", "char", "--steps", 4, "--set", "optimizer.betas=[0.8,0.9]")
    written = run("train", "--data", text, *flags, "--write-config", "a.json")
    assert written == Result(0, "wrote a.json\n", "")
    assert not Path("runs").exists()
    config = load_config("a.json")
    assert config.train.steps == 4 and config.optimizer.betas == (0.8, 0.9)
    assert config.model.vocab_size == len(set(text.read_text(encoding="utf-8")))
    run("train", "a.json", "--write-config", "b.json")
    assert Path("b.json").read_bytes() == Path("a.json").read_bytes()
    assert run("train", "a.json").code == 0
    ran = to_dict(load_config("runs/a/run.json"))
    assert ran["schedule"] == {
        "name": "cosine",
        "warmup_steps": 0,
        "min_lr": config.optimizer.lr / 10,
    }
    assert ran | {"schedule": None} == to_dict(config) | {"schedule": None}


def test_a_written_config_takes_fewer_steps_and_another_rate(run: Run, text: Path) -> None:
    flags = ("--data", text, *SIZES, "--tokenizer", "char")
    assert run("train", *flags, "--steps", 1000, "--write-config", "a.json").code == 0
    assert run("train", "a.json", "--steps", 3, "--lr", 1e-5).code == 0
    schedule = load_config("runs/a/run.json").schedule
    assert (schedule.warmup_steps, schedule.min_lr) == (0, pytest.approx(1e-6))
    kept = ("--set", "schedule.warmup_steps=7", "--set", "schedule.min_lr=0")
    assert run("train", *flags, *kept, "--write-config", "b.json").code == 0
    schedule = load_config("b.json").schedule
    assert (schedule.warmup_steps, schedule.min_lr) == (7, 0)


@pytest.mark.parametrize(
    "args",
    [
        ("--data", "nowhere.txt"),
        ("--data", "fox.txt", "--block-size", "5000"),
        ("--data", "fox.txt", *SIZES, "--init-from", "nowhere"),
        ("--data", "fox.txt", "--device", "opencl:77"),
        ("--data", "fox.txt", "--resume", "nowhere"),
    ],
    ids=lambda args: " ".join(args[-2:]),
)
def test_a_start_that_fails_leaves_nothing(run: Run, text: Path, args: tuple[str, ...]) -> None:
    assert_refused(run("train", *args, "--out", "runs/new"))
    assert not Path("runs").exists()


def test_the_printed_command_can_be_pasted(
    run: Run, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", ["my venv/bin/treadle"])
    flags = (*SIZES, "--tokenizer", "char", "--steps", 1)
    said = run("train", "--data", text, *flags, "--out", "two words").out
    assert "'my venv/bin/treadle' generate 'two words' --prompt TEXT" in said
    monkeypatch.setattr(sys, "argv", ["/lib/treadle/__main__.py"])
    said = run("train", "--data", text, *flags, "--out", "one").out
    assert "with: python -m treadle generate one " in said


# ---------------------------------------------------------------- plan


def numbers(out: str, label: str) -> list[str]:
    """What stands behind a row's label."""
    found = re.search(rf"^{re.escape(label)}  +(.+)$", out, re.MULTILINE)
    assert found, f"no row {label!r} in\n{out}"
    return found[1].split()


def test_plan_of_a_text(run: Run, text: Path) -> None:
    shown = run("plan", "--data", text, *SIZES, "--tokenizer", "char", "--steps", 100)
    assert shown.code == 0, shown
    assert not Path("runs").exists()
    out = shown.out
    characters = len(set(text.read_text(encoding="utf-8")))
    model = treadle.GPT2(vocab_size=characters, n_layer=1, n_head=2, n_embd=16, block_size=16)
    assert f"gpt2, {model.n_parameters():,} parameters" in out
    assert numbers(out, "tokens a step") == ["64"]
    assert numbers(out, "steps") == ["100"] and numbers(out, "tokens") == ["6,400"]
    training_tokens = len(text.read_text(encoding="utf-8")) * 9 // 10
    assert float(numbers(out, "epochs")[0]) == pytest.approx(6400 / training_tokens, abs=0.01)
    parts = ("weights", "gradients", "optimizer state", "total")
    weights, grads, state, total = (float(numbers(out, part)[0]) for part in parts)
    copy = float(numbers(out, "copy that is being saved")[0])
    assert copy == pytest.approx(weights + state, abs=0.11)
    assert weights == grads and total >= weights + grads + state + copy - 0.2
    micro, update, whole = (numbers(out, part) for part in ("micro_first", "update", "total"))
    assert micro[0] == update[0] == "1" and whole[0]
    assert {"time of a step", "time of training", "GFLOP/s"} <= set(re.split(r"\s{2,}|\n", out))


def test_plan_counts_micro_steps_and_works_without_data(run: Run) -> None:
    once = run("plan", *RANDOM).out
    twice = run("plan", *RANDOM, "--set", "train.grad_accum=2").out
    assert numbers(once, "micro_first")[0] == "1" and "\nmicro " not in once
    assert numbers(twice, "micro")[0] == "1"
    assert numbers(twice, "tokens a step") == numbers(once, "tokens a step") == ["64"]
    assert "epochs" not in once and "steps" not in re.findall(r"^\w+", once, re.MULTILINE)


def test_plan_shows_what_recomputation_would_save(run: Run) -> None:
    deep = (*RANDOM, "--n-layer", 4, "--block-size", 128, "--set", "train.grad_accum=2")
    out = run("plan", *deep, "--recompute", "gelu").out
    kept, cheap, blocks = (numbers(out, how) for how in ("none", "gelu", "block"))
    assert float(blocks[0]) < float(kept[0]) and float(blocks[2]) > float(kept[2])
    assert cheap[-2:] == ["this", "run"] and cheap[0] == numbers(out, "total")[0]
    assert cheap[2] == re.findall(r"^total  +([\d.]+)", out, re.MULTILINE)[1]


def test_plan_prints_and_draws_a_graph(run: Run) -> None:
    shown = run("plan", *RANDOM, "--print", "--graph", "update")
    assert shown.code == 0
    assert shown.out.startswith("graph update {") and "plan update: " in shown.out
    assert "adamw" in shown.out
    assert run("plan", *RANDOM, "--draw", "graph.svg").code == 0
    root = ElementTree.parse("graph.svg").getroot()
    words = [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "micro_first" in words and "embedding" in words


# ---------------------------------------------------------------- profile


def test_profile_of_a_model(run: Run) -> None:
    shown = run("profile", *RANDOM, "--steps", 2)
    assert shown.code == 0, shown
    kinds = {"matmul", "grad/matmul", "attention", "grad/attention_grad", "adamw", "layernorm"}
    rows = {line.split()[0]: line.split()[1:] for line in shown.out.splitlines() if line.split()}
    assert kinds <= set(rows)
    shares = [float(row[2]) for kind, row in rows.items() if len(row) == 5 and row[0].isdigit()]
    assert shares[-1] == 100.0 and sum(shares[:-1]) == pytest.approx(100.0, abs=2)
    parameters = treadle.GPT2(40, n_layer=1, n_head=2, n_embd=16, block_size=16).parameters()
    assert rows["adamw"][0] == str(len(parameters))
    assert "a whole step: " in shown.out


@pytest.mark.parametrize(
    "device",
    ["numpy", pytest.param("cpu", marks=pytest.mark.skipif(not cpu.available(), reason="no C"))],
)
def test_a_profiled_graph_computes_what_a_run_computes(device: str) -> None:
    config = load_config(None, ["model.vocab_size=40", "train.grad_accum=2"], {
        "model.n_layer": 1, "model.n_head": 2, "model.n_embd": 16, "model.block_size": 16,
        "train.batch_size": 4, "train.device": device, "train.threads": 2,
    })  # fmt: skip
    trial = trial_module.open_trial(config)
    trial.step()
    executable = trial.session.executable
    for graph in ("micro_first", "micro", "update"):
        executable.run("micro_first", "micro")
        before = {n: executable.read(n) for n in executable.program.buffers}
        executable.run(graph)
        ran = {n: executable.read(n) for n in executable.program.buffers}
        for name, array in before.items():
            executable.write(name, array)
        timed = executable.profile(graph)
        assert [node for node, _ in timed] == executable.plans[graph].graph.nodes
        assert all(seconds >= 0 for _, seconds in timed)
        assert any(seconds > 0 for _, seconds in timed)
        for name, array in ran.items():
            assert executable.read(name).tobytes() == array.tobytes(), f"{graph}: {name}"
    trial.close()


def test_profile_of_the_ladder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    smallest = profile_command.LADDER["0.1M"]
    monkeypatch.setattr(profile_command, "LADDER", {"0.1M": smallest, "again": smallest})
    shown = run("profile", "--steps", 1, "--threads", 1)
    assert shown.code == 0
    row = numbers(shown.out, "0.1M")
    assert row[:2] == numbers(shown.out, "again")[:2] == ["117,504", "64"]
    assert row[-1] == "MiB" and float(row[-2]) > 2


def test_the_ladder_has_the_sizes_that_it_names() -> None:
    for name, config in profile_command.LADDER.items():
        model = config.model.model_dump(exclude={"architecture"}, exclude_none=True)
        millions = treadle.GPT2(**model).n_parameters() / 1e6
        assert millions == pytest.approx(float(name.removesuffix("M")), rel=0.2)


# ---------------------------------------------------------------- check


@pytest.fixture
def few_cases(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    wanted = {"scale", "mul", "cross_entropy_grad", "reshape"}
    cases = [c for c in all_cases() if c.op.name in wanted and "4099" not in c.title]
    monkeypatch.setattr(check_command, "all_cases", lambda: cases)
    return cases


def test_check_passes_and_prints_a_table(run: Run, few_cases: list[Case]) -> None:
    shown = run("check", "--threads", 1)
    assert shown.code == 0, shown
    number = sum(len(c.dtypes) + c.gradient for c in few_cases)
    assert f"all {number} checks passed" in shown.out
    rows = re.findall(r"^(\w+) +(gradient|float32|bfloat16) +(\d+) .* ok$", shown.out, re.M)
    assert ("mul", "gradient") in {row[:2] for row in rows}
    assert sum(int(row[2]) for row in rows) == number
    quick = run("check", "--threads", 1, "--quick")
    assert quick.code == 0
    assert int(re.search(r"all (\d+) checks", quick.out)[1]) < number  # type: ignore[index]


def test_a_quick_check_takes_rows_of_middle_size(few_cases: list[Case]) -> None:
    whole, quick = (check_command._cases_by_op(q) for q in (False, True))
    sizes = sorted(check_command._elements(case) for case in whole["mul"])
    chosen = [check_command._elements(case) for case in quick["mul"]]
    assert len(chosen) == check_command.QUICK_ROWS < len(sizes)
    assert sizes[0] < min(chosen) and max(chosen) < sizes[-1]


def test_the_worst_output_is_the_one_nearest_to_its_limit() -> None:
    exact, near, far = checks.Check(0.0, 0.0), checks.Check(1e-7, 2e-7), checks.Check(1e-6, 1e-3)
    assert max((exact, near, far), key=lambda c: c.distance) is near
    assert checks.Check(1.0, 0.0).distance == float("inf")


def test_check_fails_with_exit_code_1_and_names_the_row(
    run: Run, few_cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = checks.symmetry

    def wrong(case: Case, backend: object, dtype: str) -> checks.Check:
        if case.op.name == "mul" and dtype == "float32":
            return checks.Check(0.5, 1e-6)
        return right(case, backend, dtype)  # type: ignore[arg-type]

    monkeypatch.setattr(check_command, "symmetry", wrong)
    shown = run("check", "--threads", 1)
    assert shown.code == 1
    assert shown.err == ""
    assert re.search(r"^mul +float32 .* FAILED$", shown.out, re.M)
    assert re.search(r"^float32 of mul .*error 5.00e-01", shown.out, re.M)
    failed = sum(c.op.name == "mul" for c in few_cases)
    assert f"{failed} of " in shown.out.splitlines()[-1]


# ---------------------------------------------------------------- config


def test_config_prints_keys_sizes_and_schema(run: Run) -> None:
    keys = run("config")
    assert keys.code == 0 and run("config", "--keys").out == keys.out
    for key in key_table():
        assert re.search(rf"^{re.escape(key.name)} ", keys.out, re.M)
        assert key.description in keys.out
    sizes = run("config", "--sizes").out.splitlines()
    assert len(sizes) == 2 + len(size_table()[0]) - 1
    assert sizes[0].split()[0] == "corpus"
    schema = json.loads(run("config", "--schema").out)
    assert "train" in schema["properties"]
    both = run("config", "--sizes", "--keys").out
    assert keys.out.strip() in both and sizes[2] in both


# ---------------------------------------------------------------- demo


@pytest.fixture
def tiny_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"model.n_embd": 16, "model.n_head": 2, "model.block_size": 32}
    monkeypatch.setattr(demo_command, "FULL", demo_command.FULL | tiny | {"train.steps": 6})
    monkeypatch.setattr(demo_command, "SMALL", demo_command.SMALL | tiny | {"train.steps": 5})
    common = {"data.vocab_size": 300, "model.n_layer": 1, "train.batch_size": 2}
    monkeypatch.setattr(demo_command, "COMMON", demo_command.COMMON | common)
    monkeypatch.setattr(demo_command, "STORIES", 40)
    monkeypatch.setattr(demo_command, "STORY_TOKENS", 20)


def test_demo_trains_and_then_only_writes(run: Run, tiny_demo: None) -> None:
    first = run("demo", "--threads", 1)
    assert first.code == 0, first
    assert "6/6" in first.out and first.err == ""
    assert "validation loss" in first.out and "training loss" in first.out  # the curve's legend
    checkpoint = Path("runs/demo-en/checkpoints/step-00000006")
    assert f"checkpoint: {checkpoint}" in first.out
    corpus = Path("runs/demo-en/stories.txt").read_text(encoding="utf-8")
    assert corpus.count("<|endoftext|>\n") == 40

    command = re.search(r"treadle (generate .*)$", first.out.strip().splitlines()[-1])
    assert command and run(*command[1].split()).code == 0

    again = run("demo", "--threads", 1)
    assert again.code == 0
    assert "finished" in again.out and "6/6" not in again.out
    stories = first.out[first.out.index("New stories") :]
    assert run("demo", "--threads", 1, "--seed", 1337).out.endswith(stories)
    assert not again.out.endswith(stories)
    assert run("demo", "--threads", 1).out != again.out


def test_demo_speaks_spanish_and_keeps_the_languages_apart(run: Run, tiny_demo: None) -> None:
    assert run("demo", "--language", "es", "--threads", 1, "--out", "x").code == 0
    assert "había" in Path("x/stories.txt").read_text(encoding="utf-8").lower()
    assert_refused(run("demo", "--threads", 1, "--out", "x"), "--out")


def test_demo_goes_on_where_it_was_interrupted(
    run: Run, tiny_demo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treadle.train import run as train_run

    whole = train_run.Trainer.run
    monkeypatch.setattr(train_run.Trainer, "run", lambda self, steps=None: whole(self, 2))
    cut = run("demo", "--threads", 1)
    assert cut.code == 0
    assert "stopped at step 2" in cut.out and "New stories" not in cut.out
    monkeypatch.setattr(train_run.Trainer, "run", whole)
    rest = run("demo", "--threads", 1)
    assert "resuming at step 2" in rest.out and "New stories" in rest.out


def test_demo_without_kernels_shrinks_and_names_a_compiler(
    run: Run, tiny_demo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "available", lambda: False)
    shown = run("demo")
    assert shown.code == 0
    assert "gcc" in shown.out.splitlines()[0] and "5/5" in shown.out
    asked = run("demo", "--device", "numpy", "--out", "y")
    assert "gcc" not in asked.out and "5/5" in asked.out
