"""No second copy of weights or optimizer state is made where models are loaded, saved and exported."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

MIB = 1 << 20


def test_nothing_is_copied_whole(tmp_path: Path) -> None:
    """35 to 40 million parameters: 70 MB and more as bf16, state of more than 500 MB. What is allowed is one tensor in
    fp32, the largest of 32 MB, and some change."""
    script = Path(__file__).with_name("memory_use.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = {entry["what"]: entry for entry in map(json.loads, done.stdout.splitlines())}
    assert len(found) == 8
    allowed = {what: entry["largest"] + 24 * MIB for what, entry in found.items()}
    for what, entry in found.items():
        weights = 2 * entry["elements"]
        assert entry["state"] > 6 * weights and allowed[what] < 0.8 * weights
    for what in ("load experts", "load large", "load large-bin"):
        assert found[what]["more"] - found[what]["state"] < allowed[what], found[what]
    for what in ("save", "load", "export"):
        assert found[what]["more"] < allowed[what], found[what]
    # Steps have activations and gradients of their own.
    beside = "save beside steps"
    assert found[beside]["more"] - found["steps"]["more"] < allowed[beside], found


def test_workers_of_a_data_loader_do_not_hold_the_tiles() -> None:
    """Forked ones, which would hold whatever is not kept from them; the model trains on what they bring."""
    script = textwrap.dedent(
        """
        import torch, megatrain
        from torch import nn

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(9))
            def forward(self, x):
                for layer in self.layers:
                    x = x + layer(x)
                return x.square().mean()

        def dirty():
            lines = dict(line.split(":") for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
            return sum(int(lines[name].split()[0]) for name in ("Private_Dirty", "Shared_Dirty")) // 1024

        class Rows(torch.utils.data.Dataset):
            def __len__(self):
                return 6
            def __getitem__(self, i):
                return torch.full((2048,), 0.1 * i), torch.utils.data.get_worker_info().id, dirty()

        model = megatrain.StreamedModel(Model(), device="cpu", dtype=torch.float32, self_check=False)
        before = model.step({"x": torch.full((1, 2048), 0.1)}).loss
        loader = torch.utils.data.DataLoader(Rows(), batch_size=1, num_workers=2, multiprocessing_context="fork")
        workers, held = set(), 0
        for x, worker, own in loader:
            model.step({"x": x})
            workers.add(int(worker))
            held = max(held, int(own))
        print(model._parts.tiles.store.nbytes >> 20, dirty(), held, len(workers))
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tiles, parent, worker, workers = map(int, done.stdout.split())  # MiB
    assert workers == 2
    assert parent > tiles > 500
    assert worker < parent - 0.9 * tiles  # the rest is the interpreter's, libraries', and the host backend's device's
