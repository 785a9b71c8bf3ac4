"""From a configuration to a finished run: data, model, device, resume, summary."""

from __future__ import annotations

import contextlib
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from treadle import backends, models
from treadle.backends import auto, cpu
from treadle.config import (
    NAMED_TOKENIZERS,
    RESUMABLE_KEYS,
    Config,
    dump_config,
    inherit,
    to_dict,
    with_absolute_paths,
)
from treadle.data.corpus import Dataset, open_data, unigram_loss
from treadle.data.tokenizer import Tokenizer
from treadle.errors import BackendError, CheckpointError, ConfigError, LockError, MismatchError
from treadle.interop.base import Imported
from treadle.models.base import Model
from treadle.train.checkpoint import Checkpoint, check_config_match, load_checkpoint
from treadle.train.environment import write_environment
from treadle.train.lock import RunLock
from treadle.train.metrics import read_metrics
from treadle.train.program import OptimizerSettings
from treadle.train.ranks import Ranks
from treadle.train.registry import Registry, find_checkpoint
from treadle.train.report import Report, command_name
from treadle.train.saver import snapshot_bytes
from treadle.train.session import Session
from treadle.train.signals import StopRequest
from treadle.train.source import adopt, adopted_model, open_source, tokenizer_of
from treadle.train.trainer import Outcome, Trainer

RUN_CONFIG = "run.json"
# Of data and tokenizers, what is in the files decides, wherever they are.
FREE_KEYS = [*RESUMABLE_KEYS, "data.path", "data.vocab_path", "data.merges_path"]


@dataclass(frozen=True)
class Request:
    """What a person asked for. resume: "auto", "never" or a checkpoint's path.

    run_steps: stop after so many more steps, with a checkpoint.
    """

    config: Config
    out: Path
    resume: str = "auto"
    run_steps: int | None = None


def train(request: Request, stream: IO[str] | None = None, ranks: Ranks | None = None) -> Outcome:
    """Train as asked; everything written goes to `request.out`. See Trainer.run for the end.

    ranks: this is rank 0 of them; the others are in `follow`.
    """
    ranks = ranks or Ranks()
    out, config = request.out, with_absolute_paths(request.config)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file, not a directory; choose another --out")
    with StopRequest() as stop, contextlib.ExitStack() as held:
        # A run that is there is locked before it is read. A new one gets its directory only after
        # all that can be refused, so that a mistake leaves nothing behind.
        new = not out.exists()
        if not new:
            held.enter_context(RunLock(out))
        registry = Registry(out)
        registry.recover()
        checkpoint, notes = _to_resume(request, registry)
        config, dataset, source = resolve(config, checkpoint)
        _check_resumable(checkpoint, config, dataset, out)
        steps = config.train.steps or 0
        start = int(checkpoint.state["step"]) if checkpoint and checkpoint.state else 0
        model = build_model(config) if source is None else adopted_model(config, source.model)
        backend, why = select_backend(config, ranks)
        if checkpoint is not None and checkpoint.state is not None:
            backend.choices.update(checkpoint.state.get("choices", {}))
        session = make_session(config, model, backend, ranks)
        held.enter_context(contextlib.closing(session.executable))
        if new:
            held.enter_context(RunLock(out))
            if Registry(out).entries:
                raise LockError(f"another process has just made {out}; run the command again")
        _begin_following(config, session)
        dump_config(config, out / RUN_CONFIG)
        write_environment(out, backend)
        memory = session.executable.memory().total + snapshot_bytes(session.program)
        memory += session.exchange_bytes
        tokens = session.micro_batch * session.grad_accum * session.block_size
        flops = session.cost().flops / tokens
        report = Report(steps, start=start, stream=stream, flops_per_token=flops, memory=memory)
        with report:
            trainer = Trainer(config, dataset, session, out, report, stop)
            for note in notes:
                report.say(note)
            for line in opening(config, dataset, session, why, memory):
                report.say(line)
            if checkpoint is not None:
                trainer.restore(checkpoint)
                done = "this run is finished" if start >= steps and trainer.line is None else ""
                report.say(f"{done or 'resuming'} at step {start} from {checkpoint.path}")
                for line in _changes(checkpoint, config, session):
                    report.say(line)
            else:
                session.initialise()
                if source is not None:
                    session.load_weights(source.weights)
                    report.say(f"starting from the weights of {config.train.init_from}")
                trainer.metrics.truncate_to(0)
            outcome = trainer.run(request.run_steps)
            report.close()
            for line in closing(outcome, dataset, steps, out):
                report.say(line)
    return outcome


# ---------------------------------------------------------------- configuration and data


def resolve(
    config: Config, checkpoint: Checkpoint | None = None
) -> tuple[Config, Dataset, Imported | None]:
    """The effective configuration, every null filled; the tokenised data; and the model that
    train.init_from names, for a new run that has one.

    checkpoint: of the run that is resumed; what was not given comes from there.
    """
    source, tokenizer = None, None
    if checkpoint is not None and checkpoint.state is not None:
        saved = Config(**checkpoint.state["config"])
        _check_given(config, saved)
        config, tokenizer = inherit(config, saved), tokenizer_of(checkpoint)
    elif config.train.init_from is not None:
        source = open_source(config.train.init_from)
        config, tokenizer = adopt(config, source), source.tokenizer
    return *open_data(config, tokenizer=tokenizer), source


def build_model(config: Config) -> Model:
    """The model that a filled configuration describes."""
    sizes = config.model.model_dump(exclude={"architecture"})
    return models.build(config.model.architecture, **sizes)


def select_backend(config: Config, ranks: Ranks | None = None) -> tuple[backends.Backend, str]:
    """The configuration's device, and why it was chosen. Several ranks share a machine's cores."""
    t = config.train
    if ranks is not None and ranks.size > 1:
        if t.device not in ("auto", "cpu", "numpy"):
            raise ConfigError(
                f"train.device: several ranks train on processors only, not on {t.device}; use "
                "--device cpu"
            )
        device = auto.host() if t.device == "auto" else t.device
        threads = t.threads or max(1, cpu.default_threads() // ranks.local)
        return backends.named(device, threads), f"{ranks.size} ranks"
    return backends.select(t.device, t.threads, t.deterministic, t.precision == "tf32")


def make_session(
    config: Config, model: Model, backend: backends.Backend, ranks: Ranks | None = None
) -> Session:
    """A session with the configuration's optimizer and batch; ConfigError where the batch does not
    go out even among the ranks."""
    o, t = config.optimizer, config.train
    assert t.batch_size is not None
    ranks = ranks or Ranks()
    unit = ranks.size * t.grad_accum
    if t.batch_size % unit:
        nearest = unit * max(1, round(t.batch_size / unit))
        raise ConfigError(
            f"train.batch_size: {t.batch_size} windows do not go out even over {ranks.size} ranks "
            f"and {t.grad_accum} accumulation steps; the nearest that do are {nearest}"
        )
    ranks.timeout = t.rank_timeout
    settings = OptimizerSettings(o.name, o.betas, o.eps, o.weight_decay, o.momentum, o.grad_clip)
    return Session(
        *(model, backend, settings, t.batch_size, config.window, t.grad_accum, t.seed),
        *("fp32" if t.precision == "tf32" else t.precision, t.recompute),
        ranks,
    )


# ---------------------------------------------------------------- several ranks


def follow(ranks: Ranks) -> None:
    """What every rank but the first does: take part in the run that rank 0 has begun."""
    with StopRequest(quiet=True) as stop:
        message = ranks.receive()
        if message is None:
            return
        config, model, choices = message
        backend = select_backend(config, ranks)[0]
        backend.choices.update(choices)
        session = make_session(config, model, backend, ranks)
        session.stop = stop
        ranks.gather(backend.identity())
        with contextlib.closing(session.executable):
            session.follow()


def _begin_following(config: Config, session: Session) -> None:
    """Let the other ranks make their sessions; BackendError where one would compute otherwise."""
    ranks, backend = session.ranks, session.backend
    if ranks.size == 1:
        return
    ranks.send((config, session.model, backend.choices))
    for rank, identity in enumerate(ranks.gather(backend.identity())):
        if identity != backend.identity():
            raise BackendError(
                f"rank {rank} on {ranks.hosts[rank]} computes with {identity}, and rank 0 with "
                f"{backend.identity()}; set TREADLE_ISA to an instruction set that all have"
            )


# ---------------------------------------------------------------- resuming


def _to_resume(request: Request, registry: Registry) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from, or None for a new run; and notes to print."""
    if request.resume == "auto":
        found = registry.latest()
        if found is None:
            return None, []
        notes = [found.note] if found.note else []
        return load_checkpoint(found.path, require_optimizer=True, verify=False), notes
    if request.resume == "never":
        if registry.entries or registry.damaged:
            raise ConfigError(
                f"{request.out} holds a run already and --resume is never; choose another --out"
            )
        return None, []
    path, note = find_checkpoint(request.resume, "newest")
    checkpoint = load_checkpoint(path, require_optimizer=True)
    newer = [e.step for e in registry.entries if e.step > int((checkpoint.state or {})["step"])]
    if newer:
        raise CheckpointError(
            f"{request.out} has checkpoints newer than {path} (up to step {max(newer)}); "
            "choose another --out to go on from there"
        )
    return checkpoint, [note] if note else []


def _check_given(config: Config, saved: Config) -> None:
    """MismatchError naming the given keys that differ from the saved run's where they must not.

    Before anything is derived: a saved value that no longer fits beside a given one is no fault
    of the person, who may never have seen its key.
    """
    given = config.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    if config.data.tokenizer == "auto":
        given.get("data", {}).pop("tokenizer", None)
    old = to_dict(saved)
    new = {section: values | given.get(section, {}) for section, values in old.items()}
    check_config_match(_placeless(old), _placeless(new), FREE_KEYS)


def _placeless(sections: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The values with one word for every path of a tokenizer."""
    kind = sections["data"]["tokenizer"]
    kind = kind if kind in NAMED_TOKENIZERS else "a file"
    return sections | {"data": sections["data"] | {"tokenizer": kind}}


def _check_resumable(
    checkpoint: Checkpoint | None, config: Config, dataset: Dataset, out: Path
) -> None:
    """MismatchError when the configuration or the data differ where they must not, ConfigError
    when the run is to end before the checkpoint."""
    if checkpoint is None or checkpoint.state is None:
        return
    # Through Config, so that keys which a checkpoint is too old to have get their defaults.
    saved = to_dict(Config(**checkpoint.state["config"]))
    check_config_match(_placeless(saved), _placeless(to_dict(config)), FREE_KEYS)
    now, then = dataset.tokenizer, checkpoint.tokenizer_json
    if now and then and now.to_json() != Tokenizer.load(then.encode()).to_json():
        raise MismatchError(
            f"{config.data.path}: its tokenizer is not that of {checkpoint.path}; restore it, or "
            f"start another run with --out {shlex.quote(f'{out}2')}"
        )
    if checkpoint.state["data"] != dataset.digest():
        raise MismatchError(
            f"the data at {config.data.path} are not those that {checkpoint.path} was trained "
            f"on; start another run with --out {shlex.quote(f'{out}2')}, or restore them"
        )
    step, steps = int(checkpoint.state["step"]), config.train.steps or 0
    if steps < step:
        raise ConfigError(
            f"train.steps: {steps} is less than step {step} of {checkpoint.path}; give at least "
            f"{step}, or start another run with --out {shlex.quote(f'{out}2')}"
        )


def _changes(checkpoint: Checkpoint, config: Config, session: Session) -> list[str]:
    """What of a resumed run makes it differ from one at a stretch."""
    assert checkpoint.state is not None
    lines = []
    before, now = checkpoint.state["config"]["train"]["steps"], config.train.steps
    if before != now and config.schedule.name != "constant":
        lines.append(
            f"train.steps changed from {before} to {now}: the {config.schedule.name} schedule now "
            "ends there, so the learning rate jumps at this point and the run differs from one "
            f"of {now} steps at a stretch"
        )
    old, new = checkpoint.state["identity"], session.identity()
    if old != new:
        keys = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        moved = ", ".join(f"{k} {old.get(k, 'none')} is now {new.get(k, 'none')}" for k in keys)
        lines.append(f"the run began elsewhere ({moved}): from here its last bits may differ")
    return lines


# ---------------------------------------------------------------- what the run says


def opening(config: Config, dataset: Dataset, session: Session, why: str, memory: int) -> list[str]:
    """Device, model, data and memory (in bytes), before the first step."""
    model, train = session.model, config.train
    assert train.steps is not None and train.batch_size is not None
    tokens_a_step = train.batch_size * session.block_size
    epochs = train.steps * tokens_a_step / max(1, len(dataset.train))
    lines = [
        f"device: {session.backend.describe()} ({why})",
        f"model: {model.architecture}, {model.n_parameters():,} parameters",
        f"data: {len(dataset.train):,} training and {len(dataset.val):,} validation tokens, "
        f"vocabulary {dataset.vocab_size:,}",
        f"run: {train.steps:,} steps of {tokens_a_step:,} tokens, {epochs:.2f} epochs; "
        f"peak memory {memory / 2**20:,.1f} MiB",
    ]
    return [*lines, *dataset.notes]


def closing(outcome: Outcome, dataset: Dataset, steps: int, out: Path) -> list[str]:
    """What came of it: losses beside the unigram loss, the checkpoint, what to do next."""
    lines = []
    if outcome.val_loss is not None and outcome.finished:
        unigram = unigram_loss(dataset)
        lines.append(
            f"validation loss {outcome.val_loss:.4f}; guessing by frequency alone: {unigram:.4f}"
        )
        pairs = [(line.get("val_loss", math.nan), line["step"]) for line in read_metrics(out)]
        best, best_step = min(pair for pair in pairs if math.isfinite(pair[0]))
        if best_step < outcome.step and outcome.val_loss > best * 1.01:
            lines.append(
                f"validation turned upward: it was lowest, {best:.4f}, at step {best_step}; fewer "
                "steps, more text or model.dropout would help"
            )
    if outcome.checkpoint is not None:
        lines.append(f"checkpoint: {outcome.checkpoint}")
    if outcome.finished:
        run = shlex.quote(str(out))
        lines.append(f"generate text with: {command_name()} generate {run} --prompt TEXT")
    else:
        lines.append(f"stopped at step {outcome.step} of {steps}; the same command resumes")
    return lines
