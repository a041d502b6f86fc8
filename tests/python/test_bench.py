"""The benchmark programs as they are installed: what they report, not how fast it is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import megatrain
from megatrain import _native
from megatrain.cli import bench, main
from megatrain.cli.bench_summary import summarise

Run = Callable[..., dict[str, Any]]
HAS_GPU = _native.cuda_device_count() > 0
NEED_GPU = ("pcie_saturation", "contention")
SPREAD = {"median", "min", "max"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a program, expects `status`, returns what it wrote."""

    def run(name: str, *arguments: str, status: int = 0) -> dict[str, Any]:
        path = tmp_path / f"{name}.json"
        assert main(["bench", name, "--quick", "--json", str(path), *arguments]) == status
        result: dict[str, Any] = json.loads(path.read_text())
        assert result["program"] == name
        assert result["megatrain"] == megatrain.__version__
        assert result["quick"] is True
        machine = result["machine"]
        assert machine["cpu"] == _native.cpu_model()
        assert machine["usable_cores"] == _native.usable_cores()
        assert len(machine["gpus"]) == _native.cuda_device_count()
        assert sum(node["cpus"] for node in machine["numa_nodes"]) >= machine["usable_cores"]
        return result

    return run


def rows(result: dict[str, Any], table: str, columns: set[str]) -> Iterator[dict[str, Any]]:
    """The rows of a table, each with these columns and with spreads that are in order."""
    found = result["tables"][table]
    assert found
    for row in found:
        assert set(row) == columns
        for key, value in row.items():
            if isinstance(value, dict):
                assert set(value) == SPREAD
                assert 0 < value["min"] <= value["median"] <= value["max"], key
        yield row


def test_host_memory(run: Run) -> None:
    result = run("host_memory")
    assert result["results"]["verified"] is True
    passes = {"read", "write", "copy", "triad", "adam_mix"}
    if "streaming_triad" in result["tables"]["passes"][0]:
        passes.add("streaming_triad")
    found = list(rows(result, "passes", {"place", "threads", "adam_mix_of_triad", *passes}))
    first = [row["threads"] for row in found if row["place"] == found[0]["place"]]
    assert first[0] == 1 and first == sorted(set(first)) and first[-1] <= _native.usable_cores()
    best = max(found, key=lambda row: row["adam_mix"]["median"])
    assert result["results"]["adam_mix_gb_per_s"] == best["adam_mix"]["median"]
    assert result["results"]["adam_mix_of_triad"] == best["adam_mix_of_triad"]


def test_adam(run: Run) -> None:
    result = run("adam", "--threads", "1,2")
    assert result["results"]["verified"] is True
    columns = {"format", "bytes_per_parameter", "threads", "variant", "gb_per_s", "mparam_per_s", "of_mix"}
    columns.add("cached_mparam_per_s")
    found = list(rows(result, "adam", columns))
    formats = {row["format"]: row["bytes_per_parameter"] for row in found}
    assert formats["bf16_split"] == 26 and formats["fp32"] == 28
    variants = ["mix alone", *_native.isa_names()]
    assert [(row["threads"], row["format"], row["variant"]) for row in found] == [
        (threads, name, variant) for threads in (1, 2) for name in formats for variant in variants
    ]
    for row in found:
        moved = row["mparam_per_s"]["median"] * row["bytes_per_parameter"] / 1e3
        assert row["gb_per_s"]["median"] == pytest.approx(moved, rel=1e-4)
        if row["variant"] == "mix alone":
            assert (row["of_mix"], row["cached_mparam_per_s"]) == (1, None)
        else:
            assert row["of_mix"] > 0 and row["cached_mparam_per_s"]["median"] > 0


@pytest.mark.parametrize("backend", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pipeline(run: Run, backend: str) -> None:
    if backend == "cuda" and not HAS_GPU:
        pytest.skip(f"no GPU: {_native.cuda_unavailable_reason()}")
    result = run("pipeline", "--backend", backend)
    assert result["results"]["verified"] is True
    assert result["results"]["backend"] == backend
    columns = {
        "updates", "level", "compute", "up", "down", "update", "longest", "step", "longest_share", "floor_share",
        "waiting", "updates_in_compute",
    }  # fmt: skip
    found = list(rows(result, "pipeline", columns))
    assert [row["updates"] for row in found] == ["after backward"] * 3 + ["as gradients land"] * 3
    for row in found:
        assert row["longest"] == max(row[part] for part in ("compute", "up", "down", "update"))
        assert row["floor_share"] >= row["longest_share"] * 0.999
        # The computation is a part of every step; the device's clock may run a little fast.
        assert row["step"]["min"] >= 0.99 * row["compute"]


@pytest.mark.gpu
def test_pcie_saturation(run: Run) -> None:
    if not HAS_GPU:
        pytest.skip(f"no GPU: {_native.cuda_unavailable_reason()}")
    result = run("pcie_saturation")
    assert result["results"]["verified"] is True
    columns = {
        "case", "up", "up_share", "down", "down_share", "both_up", "both_down", "both", "both_share",
    }  # fmt: skip
    for table in ("sizes", "memory", "streams"):
        found = list(rows(result, table, columns))
        assert found[0]["case"].startswith("bare cudaMemcpyAsync") and found[0]["up_share"] == 1
    kinds = [row["case"] for row in result["tables"]["memory"][1:]]
    assert kinds == ["registered, huge pages", "registered, 4 KiB pages", "cudaHostAlloc", "pageable"]
    pieces = list(rows(result, "pieces", {"case", "copies", "up", "up_share", "down", "down_share", "held_up"}))
    assert [row["copies"] for row in pieces][:2] == [1, 12]
    assert result["results"]["copies_verified"] > sum(row["copies"] for row in pieces)
    assert ("gpus" in result["tables"]) == (_native.cuda_device_count() > 1)


@pytest.mark.gpu
def test_contention(run: Run) -> None:
    if not HAS_GPU:
        pytest.skip(f"no GPU: {_native.cuda_unavailable_reason()}")
    result = run("contention")
    columns = {
        "threads", "updates_alone", "updates", "updates_kept", "up", "up_kept", "down", "down_kept", "ring",
    }  # fmt: skip
    found = list(rows(result, "contention", columns))
    assert found[0]["threads"] == "none"
    threads = [int(row["threads"]) for row in found[1:]]
    assert threads == sorted(set(threads)) and threads[-1] == _native.usable_cores()
    best = max(row["ring"]["median"] for row in found[1:])
    good = [int(row["threads"]) for row in found[1:] if row["ring"]["median"] >= 0.98 * best]
    assert result["results"]["recommended_threads"] == good[0]


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
@pytest.mark.parametrize("name", NEED_GPU)
def test_without_a_gpu_they_say_what_they_lack(run: Run, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    result = run(name, status=3)
    assert result["lacks"] == f"needs a CUDA device: {_native.cuda_unavailable_reason()}"
    assert capfd.readouterr().err == f"{name}: {result['lacks']}\n"
    assert "tables" not in result


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["adam", "--fast"], 'adam: unknown argument "--fast" (see --help)'),
        (["adam", "--threads", "two"], 'adam: --threads is "two"; it takes numbers from 1 to 4096'),
        (["adam", "--threads", "1,5000"], 'adam: --threads is "1,5000"; it takes numbers from 1 to 4096'),
        (["pipeline", "--layers", "300000000"], 'pipeline: --layers is "300000000"; it takes numbers from 1 to 10000'),
        (["pipeline", "--threads", "99999999999"], 'pipeline: --threads is "99999999999"; it takes numbers from 0 to'),
        (["host_memory", "--mib", "99999999"], 'host_memory: --mib is "99999999"; it takes numbers from 0 to 16777216'),
        (["pcie_saturation", "--device", "x"], 'pcie_saturation: --device is "x"; it takes numbers from 0 to 1023'),
        (["contention", "--layer", "8b"], 'contention: unknown model "8b"; known: 0.5b, 1.5b, 3b, 7b, 14b'),
        (["adam", "--layer", "8b"], 'adam: unknown model "8b"; known: 0.5b, 1.5b, 3b, 7b, 14b'),
        (["adam", "--json"], "adam: --json needs a value"),
        (["pipeline", "--backend", "tpu"], 'pipeline: --backend is "tpu"; it must be auto, cuda or host'),
        (["memory"], "megatrain: argument NAME: invalid choice: 'memory'"),
        ([], "megatrain: the following arguments are required: NAME"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    error = capfd.readouterr().err
    assert error.startswith(message) and error.count("\n") == 1


@pytest.mark.parametrize("program", ["host_memory", "all"])
@pytest.mark.parametrize("place", ["absent/out.json", "."])
def test_a_file_that_cannot_be_written_is_refused_first(
    program: str, place: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / place
    assert main(["bench", program, "--quick", "--json", str(path)]) == 2
    shown = capfd.readouterr()
    assert f"--json {path} cannot be written" in shown.err and "GB/s" not in shown.out
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("mine")
    assert main(["bench", "adam", "--quick", "--json", str(path), "--layer", "8b"]) == 2
    assert path.read_text() == "mine" and list(tmp_path.iterdir()) == [path]


def test_memory_that_there_is_not_is_asked_for_in_figures(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "host_memory", "--mib", str(1 << 24)]) == 1
    assert re.fullmatch(
        r"host_memory: 4\.92e\+04 GiB of host memory are needed, \S+ are available according to .+; "
        r"ask for a smaller --mib\n",
        capfd.readouterr().err,
    )


def test_sizes_that_are_asked_for_hold_in_a_quick_run(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run("host_memory", "--mib", "9")
    shown = capfd.readouterr().out
    assert "three arrays of 9 MiB" in shown and "--quick: shows that it works" in shown


def test_help(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    assert main(["bench", "adam", "--help"]) == 0
    shown = capfd.readouterr().out
    for part in (*NEED_GPU, "host_memory", "adam", "pipeline", "--json FILE", "--threads LIST"):
        assert part in shown


def test_an_installation_without_them_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "_FOLDER", tmp_path)
    assert main(["bench", "adam"]) == 2
    assert "this installation was built without benchmarks" in capfd.readouterr().err


def test_they_need_no_library_but_the_systems() -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not installed")
    for name in (*NEED_GPU, "host_memory", "adam", "pipeline"):
        listing = subprocess.run(
            ["readelf", "-d", bench.program(name)], capture_output=True, text=True, check=True
        ).stdout
        needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", listing)
        assert needed
        assert [lib for lib in needed if not re.match(r"(libc|libm|libdl|librt|libpthread|ld-linux.*)\.so", lib)] == []


def test_all_and_their_summary(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "all.json"
    assert main(["bench", "all", "--quick", "--json", str(path)]) == 0
    shown = capfd.readouterr().out
    results = json.loads(path.read_text())
    assert list(results) == ["pcie_saturation", "host_memory", "adam", "contention", "pipeline"]
    for name, result in results.items():
        assert result["program"] == name
    summary = shown[shown.rindex("\n\n") :]
    lines = ["STREAM triad", "the update's bytes alone", "update, bf16_split", "update, fp32", "ring, updates"]
    if HAS_GPU:
        lines += ["copies up", "copies down", "both at once", "a layer, one burst up", "update threads"]
    else:
        lines += [rf"{name} +- +needs a CUDA device" for name in NEED_GPU]
    for line in lines:
        assert re.search(rf"^{line}", summary, re.MULTILINE), line
    assert main(["bench", "all", "--threads", "2"]) == 2


def test_all_goes_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = bench.program
    monkeypatch.setattr(bench, "program", lambda name: Path("/bin/false") if name == "adam" else real(name))
    path = tmp_path / "all.json"
    assert main(["bench", "all", "--quick", "--json", str(path)]) == 1
    assert list(json.loads(path.read_text())) == ["pcie_saturation", "host_memory", "contention", "pipeline"]
    assert re.search(r"^adam +- +failed with status 1$", capfd.readouterr().out, re.MULTILINE)


def test_the_summary_takes_the_best_of_each_pass() -> None:
    rows = [
        dict(place="node 0", threads=threads, triad=dict(median=triad), adam_mix=dict(median=mix), adam_mix_of_triad=0)
        for threads, triad, mix in ((16, 130.0, 120.0), (32, 118.0, 150.0))
    ]
    lines = list(summarise({"host_memory": {"tables": {"passes": rows}}}))
    assert lines == [
        ("STREAM triad", "130.0 GB/s", "node 0, 16 threads"),
        ("the update's bytes alone", "150.0 GB/s", "115.4 % of the triad, node 0, 32 threads"),
    ]
