"""Makes the small models and their numbers that `make test` compares with, in tests/fixtures.

    python tests/parity/make_fixtures.py

needs PyTorch and transformers. The files are stored, so that the ordinary tests need neither:

    NAME/config.json, model.safetensors   what transformers writes
    NAME/expected.safetensors             tokens, targets, logits, losses, `d NAME` for gradients
    pytorch/pytorch_model.bin             the first model as torch.save writes it
"""

from __future__ import annotations

import sys
from pathlib import Path

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
sys.path.insert(0, str(FIXTURES.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402

import peer  # noqa: E402
from models import STORED, VOCAB  # noqa: E402

BATCH, TIME = 2, 9


def main() -> None:
    for name, small in STORED.items():
        model = small.model()
        folder = peer.save(model, FIXTURES / name)
        (folder / "generation_config.json").unlink()
        if name == next(iter(STORED)):
            (FIXTURES / "pytorch").mkdir(exist_ok=True)
            torch.save(model.state_dict(), FIXTURES / "pytorch" / "pytorch_model.bin")
            model.config.save_pretrained(FIXTURES / "pytorch")
        tokens, targets = peer.batch(VOCAB, BATCH, TIME)
        found = peer.numbers(model, tokens, targets)
        arrays = {
            "tokens": tokens,
            "targets": targets,
            "logits": found.logits,
            "losses": np.array(found.losses, np.float32),
        }
        arrays |= {f"d {key}": array for key, array in found.grads.items()}
        save_file(arrays, folder / "expected.safetensors")
        print(f"{name}: loss {found.losses[0]:.4f} to {found.losses[-1]:.4f}")


if __name__ == "__main__":
    main()
