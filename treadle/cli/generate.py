"""`treadle generate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from treadle.cli.options import DEVICE


def command(
    source: str = typer.Argument(..., metavar="RUN|CHECKPOINT|model.safetensors"),
    prompt: list[str] = typer.Option(
        [], help="The text to go on from. Repeatable: texts are then written side by side."
    ),
    prompts: Path | None = typer.Option(
        None, metavar="FILE", help="A prompt on each line; `-` is standard input."
    ),
    tokens: int = typer.Option(200, min=0, help="How many tokens to write at most."),
    stop: list[str] = typer.Option([], help="End a text before this string. Repeatable."),
    temperature: float = typer.Option(0.8, help="0 always takes the most likely token."),
    top_k: int = typer.Option(0, help="Draw among the k most likely tokens; 0 is off."),
    top_p: float = typer.Option(1.0, help="Draw among the likeliest that make up p; 1 is off."),
    seed: int = typer.Option(
        0, min=0, help="The same seed writes the same text; further prompts take the next ones."
    ),
    precision: str = typer.Option(
        "fp32", help="bf16 keeps weights and cache in half the memory, and is faster."
    ),
    batch_size: int = typer.Option(8, min=1, help="Prompts that are computed together."),
    jsonl: bool = typer.Option(
        False, "--jsonl", help='Print {"prompt": …, "text": …}, a line each.'
    ),
    device: str = DEVICE,
    threads: int | None = typer.Option(None, min=1, help="CPU threads.", show_default=False),
    tokenizer: Path | None = typer.Option(
        None, help="A tokenizer.json or its directory, for a checkpoint without one."
    ),
    vocab: Path | None = typer.Option(None, help="vocab.json of a BPE tokenizer."),
    merges: Path | None = typer.Option(None, help="merges.txt of a BPE tokenizer."),
) -> None:
    """Write text with a trained model: a run's best checkpoint, a checkpoint, or one file."""
    from treadle.api import load
    from treadle.generate import Sampling
    from treadle.train.report import is_terminal, printable

    texts = [_lines_joined(text) for text in prompt]
    if prompts is not None:
        texts += _read_prompts(prompts)
    sampling = Sampling(temperature, top_k, top_p, seed)
    model = load(source, device=device, threads=threads, tokenizer=tokenizer, vocab=vocab,
                 merges=merges)  # fmt: skip
    shown = printable if is_terminal(sys.stdout) else str  # no text may steer the terminal
    for note in model.notes:
        print(f"treadle: {note}", file=sys.stderr)
    texts = texts or [""]
    notices: dict[str, None] = {}
    if len(texts) == 1 and prompts is None and not jsonl:
        out = sys.stdout
        pieces = model.stream(texts[0], tokens, sampling, notices.setdefault, stop, precision)
        out.write(shown(texts[0]))
        out.flush()
        for piece in pieces:
            out.write(shown(piece))
            out.flush()
        _print("")
    else:
        options = dict(stop=stop, precision=precision, batch_size=batch_size, **vars(sampling))
        for at in range(0, len(texts), batch_size):
            part = texts[at : at + batch_size]
            options["seed"] = seed + at
            written = model.generate(part, tokens, notice=notices.setdefault, **options)
            for i, text in enumerate(written):
                if jsonl:
                    line = {"prompt": part[i], "text": text[len(part[i]) :]}
                    _print(json.dumps(line, ensure_ascii=False))
                else:
                    _print(f"--- {at + i + 1}\n{shown(text)}")
    for notice in notices:  # not before, because it would stand in the middle of the text
        print(f"treadle: {notice}", file=sys.stderr)


def _lines_joined(text: str) -> str:
    """Line ends as in the texts of a corpus."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_prompts(file: Path) -> list[str]:
    """The lines of a file that are not empty; DataError where it cannot be read."""
    from treadle.errors import DataError

    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        lines = _lines_joined(data.decode("utf-8-sig")).split("\n")
    except OSError as error:
        raise DataError(f"{file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: byte {error.start} is not UTF-8; convert the file") from None
    found = [line for line in lines if line.strip()]
    if not found:
        raise DataError(f"{file}: no prompts in it; each line is one")
    return found


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
