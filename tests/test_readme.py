"""The README and the docs: commands and examples run, links and flags exist, tables are the code's.

    python tests/test_readme.py

writes the generated parts of the docs anew.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest
import typer

import treadle
from test_imports import ALLOWED
from treadle.backends import build
from treadle.cli import COMMANDS, main
from treadle.config import (
    ARCHITECTURES,
    PRECISIONS,
    Config,
    key_table,
    size_table,
)
from treadle.data.stories import generate_stories
from treadle.graph.value import ROLES
from treadle.models.gpt2 import GPT2
from treadle.train.run import FREE_KEYS

ROOT = Path(__file__).resolve().parents[1]
README, SPANISH, TRAINING = ROOT / "README.md", ROOT / "README.es.md", ROOT / "docs" / "training.md"
FORMATS, TOUR = ROOT / "docs" / "formats.md", ROOT / "docs" / "tour.md"
ARCHITECTURE, GUIDE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "adding-an-op.md"
MODELS = ROOT / "docs" / "adding-a-model.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

# Command lines that only their parts are checked of: they install, or take a minute or more.
NOT_RUN = (
    *("make demo", "make test", "pip install .", "treadle demo"),
    # What devices there are differs; test_devices.py has these.
    *("pip install '.[opencl]'", "treadle check --device opencl"),
    *("pip install 'treadle[cuda]'", "pip install '.[cuda]'"),
    "treadle train --data story.txt --device cuda --precision bf16",
    "treadle train --data story.txt --device opencl",
    *("python -m venv .venv", ". .venv/bin/activate"),
    # Several processes: test_distributed.py.
    "pip install 'treadle[distributed]'",
    "mpirun -n 2 treadle train --data story.txt --device cpu",
    # A whole book, for minutes.
    "treadle train configs/gpt-5m.json --data quijote.txt --set data.val_fraction=0.1",
    "treadle plot runs/gpt-5m -o quijote.png",
)
# What a command line gets on top, so that it is quick; the last of two equal flags counts.
QUICKER = {
    "treadle train --data story.txt": "--steps 2 --run-steps 1",
    "treadle train --data story.txt --out runs/mine": "--steps 2",
    "treadle train --out runs/story": "",
    "treadle train --out runs/story --list-checkpoints": "",
    "treadle prepare texts/ --out tokens/texts": "",
    "treadle train --data tokens/texts": "--steps 2 --run-steps 1",
    "treadle generate runs/texts": "--tokens 5",
    "treadle prepare libro.txt --tokenizer spanish --out tokens/libro": "",
    "treadle train configs/spanish-5m.json --data tokens/libro": "--run-steps 1",
    "treadle generate runs/spanish-5m --prompt": "--tokens 5",
    "treadle import gpt2 --out models/gpt2": "",
    "treadle train configs/finetune-gpt2.json": "--steps 2",
    "treadle export runs/story --to hf --out models/story": "",
    "treadle info models/story": "",
    "treadle export runs/finetune-gpt2 --to llmc --out story.bin": "",
    "treadle info story.bin": "",
    "treadle eval runs/story --data story.txt": "",
    "treadle report runs/story": "",
    "treadle plot runs/story -o loss.png": "",
    "treadle train --out runs/story --steps 3000": "--steps 4",
    "treadle train --data story.txt --write-config story.json": "",
    'treadle generate runs/story --prompt "Once upon a time"': "--tokens 5",
    "treadle generate runs/mine": "--tokens 5",
    "treadle plan --data story.txt": "",
    "treadle profile --data story.txt": "--steps 1",
    "treadle devices": "",
    "treadle check --quick": "",
    "treadle config": "",
}


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# ---------------------------------------------------------------- reading pages


def fences(page: Path, language: str) -> list[tuple[str, str]]:
    """(what stands behind the language, content) of each fenced block of a language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\b *([^\n]*)\n(.*?)^```$", text, re.M | re.S)


def command_lines(page: Path) -> list[str]:
    return [line for _, block in fences(page, "sh") for line in block.splitlines() if line]


def code_spans(page: Path) -> list[str]:
    """Every `code` outside of fenced blocks."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def tables_under(page: Path, heading: str) -> list[list[str]]:
    """The code spans in the first column of each table under a heading."""
    section = re.split(
        r"^## ", page.read_text(encoding="utf-8").partition(f"## {heading}\n")[2], flags=re.M
    )[0]
    tables = re.findall(r"^\| --- .*\n((?:\|.*\n)+)", section, re.M)
    return [
        [
            name
            for row in table.splitlines()
            for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])
        ]
        for table in tables
    ]


def block_of(page: Path, name: str) -> str:
    (found,) = (content for title, content in fences(page, r"\w+") if title == name)
    return found


# ---------------------------------------------------------------- commands


def quicker(line: str) -> str:
    """The command line with what the longest beginning of it in QUICKER adds."""
    start = max((key for key in QUICKER if line.startswith(key)), key=len, default=None)
    assert start is not None, f"add {line!r} to QUICKER or to NOT_RUN"
    return f"{line} {QUICKER[start]}"


def run_commands(page: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Runs the commands of a page, in order, beside a short story.txt."""
    patch.chdir(folder)
    Path("story.txt").write_text(generate_stories("en", 3), encoding="utf-8")
    Path("texts").mkdir()
    Path("texts/stories.txt").write_text(generate_stories("en", 100), encoding="utf-8")
    Path("libro.txt").write_text(generate_stories("es", 100), encoding="utf-8")
    shutil.copytree(ROOT / "configs", "configs")
    # A name on the hub counts where there is no such path.
    small = GPT2(vocab_size=257, n_layer=1, n_head=1, n_embd=8, block_size=64)
    treadle.LanguageModel(small, treadle.Tokenizer.byte()).save("gpt2")
    for line in command_lines(page):
        if line not in NOT_RUN:
            program, *arguments = shlex.split(quicker(line))
            assert program == "treadle"
            assert main(arguments) == 0, line


@pytest.mark.parametrize("page", [README, SPANISH], ids=lambda page: page.name)
def test_commands_of_the_readme(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_commands(page, tmp_path, monkeypatch)
    said = capsys.readouterr().out
    assert "stopped at step 1 of 2; the same command resumes" in said
    assert "resuming at step 1" in said and "resuming at step 2" in said
    assert "Once upon a time" in said
    assert (tmp_path / "graph.svg").read_text(encoding="utf-8").startswith("<svg")
    files = {path.name for path in (tmp_path / "runs/story/checkpoints/step-00000004").iterdir()}
    spans = code_spans(page)
    assert {n for n in files if n in spans} == files - {
        "optimizer.safetensors",
        "trainer_state.json",
    }
    the_formats_are_those_of(tmp_path)


def the_formats_are_those_of(folder: Path) -> None:
    """The files of a run and of a prepared corpus have the keys that formats.md lists."""
    (run,) = tables_under(FORMATS, "Run directory")
    assert {path.name for path in (folder / "runs/story").iterdir()} <= {
        name.partition("/")[0] for name in run
    }
    (environment,) = tables_under(FORMATS, "environment.json")
    found = json.loads((folder / "runs/story/environment.json").read_text(encoding="utf-8"))
    assert set(environment) >= set(found) >= set(environment) - {"isa", "library"}
    (columns,) = tables_under(FORMATS, "metrics.jsonl and metrics.csv")
    header = (folder / "runs/story/metrics.csv").read_text(encoding="utf-8").splitlines()[0]
    assert columns == header.split(",")
    metadata, counts, report = tables_under(FORMATS, "Prepared corpora")
    for name, keys in (("metadata.json", metadata), ("report.json", report)):
        found = json.loads((folder / "tokens/texts" / name).read_text(encoding="utf-8"))
        assert set(keys) == set(found), name
        assert set(counts) == set(found["counts"]), name


def test_both_readmes_say_the_same() -> None:
    assert re.findall(r"^```.*?^```$", README.read_text(encoding="utf-8"), re.M | re.S) == (
        re.findall(r"^```.*?^```$", SPANISH.read_text(encoding="utf-8"), re.M | re.S)
    )
    assert set(code_spans(README)) == set(code_spans(SPANISH))
    assert parts_of(README) == parts_of(SPANISH)


def parts_of(page: Path) -> tuple[list[str], list[str], str]:
    """A page's headings by their level, its links but the first, and its table of measurements."""
    text = page.read_text(encoding="utf-8")
    (measured,) = re.findall(r"<!-- measured.*?<!-- end of measured -->", text, re.S)
    numbers = re.findall(r"\d+", measured)
    return (
        re.findall(r"^#+(?= )", text, re.M),
        re.findall(r"\]\(([^)\s]+)\)", text)[1:],
        " ".join(numbers),
    )


def test_commands_of_the_training_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_commands(TRAINING, tmp_path, monkeypatch)
    for name in (span for span in code_spans(TRAINING) if span.startswith("metrics.")):
        assert (tmp_path / "runs/story" / name).is_file()
    ((_, example),) = fences(TRAINING, "python")
    exec(example, {})
    ((_, config),) = fences(TRAINING, "json")
    assert Config(**json.loads(config)).model.n_layer == 4
    written = json.loads((tmp_path / "story.json").read_text(encoding="utf-8"))
    assert written["model"]["n_embd"] is not None


def test_every_quicker_command_is_used() -> None:
    lines = [*command_lines(README), *command_lines(TRAINING)]
    assert all(any(line.startswith(start) for line in lines) for start in QUICKER)


@cache
def parameters_of(command: str) -> list[Any]:
    app = typer.Typer(add_completion=False)
    app.command()(import_module(f"treadle.cli.{COMMANDS[command][0]}").command)
    return typer.main.get_command(app).params  # type: ignore[attr-defined]


@cache
def options_of(command: str) -> set[str]:
    parameters = parameters_of(command)
    return {name for p in parameters for name in (*p.opts, *p.secondary_opts)} | {"--help"}


@pages
def test_commands_and_flags_exist(page: Path) -> None:
    every = {flag for command in COMMANDS for flag in options_of(command)}
    for code in [*command_lines(page), *code_spans(page)]:
        words = code.split()
        flags = {word.partition("=")[0] for word in words if word.startswith("--")}
        if words[0] == "treadle":
            if len(words) > 1 and not words[1].startswith("-"):
                assert words[1] in COMMANDS, code
                assert flags <= options_of(words[1]), code
        elif re.match("--[a-z]", code):
            assert flags <= every, code


@pages
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    for code in [*command_lines(page), *code_spans(page)]:
        if code.startswith("make "):
            assert code.split()[1] in targets, code


# ---------------------------------------------------------------- examples


def shortened(text: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in text, f"the example has no {old!r} any more"
        text = text.replace(old, new)
    return text


def test_the_ten_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (_, example), _ = fences(README, "python")
    assert treadle.__doc__ is not None
    assert indent(example, "    ").strip("\n") in dedent(treadle.__doc__)
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text(generate_stories("en", 2), encoding="utf-8")
    small = ("n_embd=128", "n_embd=16"), ("steps=500", "steps=2"), ("tokens=100", "tokens=9")
    exec(shortened(example, *small), {})
    assert capsys.readouterr().out.startswith("Once")
    assert (tmp_path / "my-model" / "model.safetensors").is_file()


def test_a_model_of_ones_own() -> None:
    _, (_, example) = fences(README, "python")
    names: dict = {}
    exec(example, names)
    assert names["step"]["w"].item() == pytest.approx(2, abs=1e-2)
    assert names["step"]["b"].item() == pytest.approx(1, abs=1e-2)


def test_the_plan_of_the_tour(capsys: pytest.CaptureFixture[str]) -> None:
    ((_, example),) = fences(TOUR, "python")
    exec(example, {})
    said = capsys.readouterr().out
    assert said.startswith("graph micro_first") and "plan micro_first" in said
    ((_, shown),) = fences(ARCHITECTURE, "text")
    for line in shown.splitlines():
        kernel, *buffers = re.findall(r"^[ |]*(\w+)(?=\()|(@[\w.]+)", line)
        wanted = {kernel[0], *(buffer for _, buffer in buffers)}
        assert any(wanted <= set(re.findall(r"@?[\w.]+", x)) for x in said.splitlines()), line


# ---------------------------------------------------------------- adding an op


CHECK_ROWS = """
from treadle import cases, checks
from treadle.backends.cpu import CpuBackend
for case in cases._softsign():
    results = [checks.gradient(case)] if case.gradient else []
    results += [checks.symmetry(case, CpuBackend(2), dtype) for dtype in case.dtypes]
    assert all(result.ok for result in results), case.title
print("all rows pass")
"""


def test_the_op_of_the_guide(tmp_path: Path) -> None:
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    isa = next(isa.name for isa in build.ISAS if isa.family == compiler.family)
    package = tmp_path / "treadle"
    shutil.copytree(ROOT / "treadle", package, ignore=shutil.ignore_patterns("lib", "*.c"))
    shutil.copy(ROOT / "treadle/kernels/walker.c", package / "kernels")
    for name in ("treadle/ops/softsign.py", "treadle/ops/softsign.c"):
        assert not (ROOT / name).exists()
        (tmp_path / name).write_text(block_of(GUIDE, name), encoding="utf-8")
    for name in ("treadle/ops/__init__.py", "treadle/cases.py"):
        with (tmp_path / name).open("a", encoding="utf-8") as file:
            file.write("\n\n" + block_of(GUIDE, name))

    def python(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "TREADLE_ISA": isa, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    python("-m", "treadle.backends.build", "--strict", "--isa", isa)
    assert "all rows pass" in python("-c", CHECK_ROWS)
    example = block_of(GUIDE, "softsign_example.py")
    loss, weights = python("-c", shortened(example, ("lr=0.05", 'lr=0.05, device="numpy"'))).split(
        maxsplit=1
    )
    assert float(loss) < 1e-6
    assert [float(w) for w in weights.strip("[] \n").split()] == pytest.approx(
        [1, -2, 0.5], abs=1e-2
    )


# ---------------------------------------------------------------- adding a model


def test_the_model_of_the_guide(tmp_path: Path) -> None:
    ((_, example),) = fences(MODELS, "python")
    names: dict = {}
    exec(example, names)
    text = tmp_path / "text.txt"
    text.write_text("round and round the garden\n" * 40)
    data = treadle.load_data(text, tokenizer="char")
    model = names["Listener"](vocab_size=data.vocab_size)
    assert names["Listener"].from_hf_config(model.hf_config(None)) == model
    lm = treadle.LanguageModel(model, data.tokenizer, threads=1)
    losses = lm.fit(data, steps=150, batch_size=4, lr=1e-2, progress=False)
    assert losses[-1] < 0.3 * losses[0]
    assert "the garden" in lm.generate("round and", tokens=30, temperature=0)


# ---------------------------------------------------------------- names


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pages
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            assert file.exists(), target
            assert not anchor or anchor in anchors(file), target


def source_files() -> list[Path]:
    folders = ("treadle", "tests", "bench", "examples", "tools")
    return [path for folder in folders for path in (ROOT / folder).rglob("*.*")]


@pages
def test_files_that_are_named_exist(page: Path) -> None:
    there = [path.as_posix() for path in source_files()]
    for span in code_spans(page):
        if (
            re.fullmatch(r"[\w/.]+\.(py|c|h)", span)
            and "softsign" not in span
            and "NAME" not in span
        ):
            assert any(path.endswith("/" + span) for path in there), span


@pages
def test_configurations_that_are_named_exist(page: Path) -> None:
    named = {n for n in code_spans(page) if re.fullmatch(r"configs/.+|[\w-]+-[\w-]+\.json", n)}
    for name in named:
        assert (ROOT / "configs" / name.removeprefix("configs/")).exists(), name


def test_names_in_the_tour_are_in_files_that_it_named_before() -> None:
    prose = " ".join(
        re.sub(r"^```.*?^```$", "", TOUR.read_text("utf-8"), flags=re.M | re.S).split()
    )
    read = ""
    for stop in re.split(r"(?=\*\*\d+\. )", prose)[1:]:
        spans = re.findall(r"`([^`]+)`", stop)
        for path in source_files():
            if any(path.as_posix().endswith("/" + span) for span in spans):
                read += path.read_text(encoding="utf-8")
        for name in (span for span in spans if re.fullmatch(r"[A-Za-z_]\w+(\.[a-z_]+)?", span)):
            if name.rpartition(".")[2] not in ("py", "c", "h"):
                assert all(re.search(rf"\b{word}\b", read) for word in name.split(".")), name


@cache
def dependencies() -> dict[str, set[str]]:
    """The packages of each extra; those that are always installed under "always"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"always": project["dependencies"], **project["optional-dependencies"]}
    return {
        name: {re.match(r"[\w-]+", line)[0] for line in lines}  # type: ignore[index]
        for name, lines in groups.items()
    }


def test_dependencies() -> None:
    section = ARCHITECTURE.read_text(encoding="utf-8").partition("## Dependencies")[2]
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \| [^|]+ \|$", section, re.M)
    listed = {(package, extra) for package, of in rows for extra in re.findall(r"\w+", of)}
    assert listed == {(package, extra) for extra, of in dependencies().items() for package in of}


@pages
def test_extras_exist(page: Path) -> None:
    for extra in re.findall(r"(?:treadle|\.)\[([\w,]+)\]", page.read_text(encoding="utf-8")):
        assert set(extra.split(",")) <= set(dependencies()) - {"always"}, extra


def test_keys_that_may_change_on_resume() -> None:
    (bullet,) = re.findall(r"What may change on resume:.*?(?=\n- )", TRAINING.read_text(), re.S)
    assert set(re.findall(r"`(\w+\.\w+)`", bullet)) == {*FREE_KEYS, "data.tokenizer"}


def test_roles_of_buffers() -> None:
    assert set(ROLES) <= set(code_spans(ARCHITECTURE))


def test_limits_are_as_the_readme_says() -> None:
    for page, precision, models in (
        (
            README,
            "float32 only",
            "The architectures are GPT-2, Llama, and Gemma 1 and 2.",
        ),
        (
            SPANISH,
            "solo en float32",
            "Las arquitecturas son GPT-2, Llama y Gemma 1 y 2.",
        ),
    ):
        text = page.read_text(encoding="utf-8")
        assert (precision in text) == (PRECISIONS == ("fp32",))
        assert (models in text) == (ARCHITECTURES == ("gpt2", "llama", "gemma"))


# ---------------------------------------------------------------- generated parts


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def keys() -> str:
    rows = [
        [f"`{k.name}`", f"`{json.dumps(k.default)}`", k.type, k.description] for k in key_table()
    ]
    return _table(["key", "default", "allowed", "what it is"], rows)


def sizes() -> str:
    rows = size_table()
    header = [f"`{name}`" if "." in name else name for name in rows[0]]
    return _table(header, [list(row.values()) for row in rows])


def flags(command: str) -> str:
    rows = []
    for p in parameters_of(command):
        if p.param_type_name != "option" or p.name == "help":
            continue
        names = ", ".join(f"`{name}`" for name in (*p.opts, *p.secondary_opts))
        takes = f" `{p.metavar}`" if p.metavar else ""
        default = "" if p.required or p.default in (None, "", False) else f"`{p.default}`"
        rows.append([names + takes, default, p.help])
    return _table([f"`treadle {command}`", "default", "what it does"], rows)


def train_flags() -> str:
    return flags("train")


def eval_flags() -> str:
    return flags("eval")


def report_flags() -> str:
    return flags("report")


def plot_flags() -> str:
    return flags("plot")


def imports() -> str:
    rows = [
        [f"`{unit}`", ", ".join(f"`{name}`" for name in sorted(others)) or "nothing of ours"]
        for unit, others in ALLOWED.items()
    ]
    return _table(["module", "may import"], rows)


GENERATED: dict[Path, list[Callable[[], str]]] = {
    TRAINING: [sizes, keys, train_flags, report_flags, plot_flags, eval_flags],
    ARCHITECTURE: [imports],
}


def generated(page: Path) -> Iterator[tuple[str, str]]:
    """The text of a page with its generated part made anew, for each part."""
    text = page.read_text(encoding="utf-8")
    for part in GENERATED[page]:
        marker = f"<!-- generated: {part.__name__} -->"
        head, found, rest = text.partition(marker)
        assert found, f"{page}: no {marker}"
        _, end, tail = rest.partition("<!-- end -->")
        text = f"{head}{marker}\n\n{part()}\n\n{end}{tail}"
        yield part.__name__, text


@pytest.mark.parametrize("page", GENERATED, ids=lambda page: page.name)
def test_generated_parts(page: Path) -> None:
    for name, text in generated(page):
        assert text == page.read_text(encoding="utf-8"), f"{name}: run python tests/test_readme.py"


if __name__ == "__main__":
    for changed in GENERATED:
        for _, content in generated(changed):
            changed.write_text(content, encoding="utf-8", newline="\n")
