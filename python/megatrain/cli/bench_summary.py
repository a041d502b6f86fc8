"""What a machine can do, in a few lines, from the JSON files of the benchmark programs."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Line = tuple[str, str, str]  # what, how much, held against what


def summarise(results: Mapping[str, Any]) -> Iterator[Line]:
    """Lines for people. `results` has the programs' JSON by name, of those that did not fail; one that lacks its device
    says so."""
    for name, lines in (
        ("pcie_saturation", _link),
        ("host_memory", _memory),
        ("adam", _update),
        ("contention", _threads),
        ("pipeline", _ring),
    ):
        if name not in results:
            continue
        result = results[name]
        if "lacks" in result:
            yield name, "-", result["lacks"]
        else:
            yield from lines(result)


def _link(result: Mapping[str, Any]) -> Iterator[Line]:
    largest = result["tables"]["sizes"][-1]
    for key, name in (("up", "copies up"), ("down", "copies down"), ("both", "both at once")):
        share = _percent(largest[f"{key}_share"])
        yield name, f"{largest[key]['median']:.1f} GB/s", f"{share} of a bare loop of copies"
    pieces = {row["case"]: row["up"]["median"] for row in result["tables"]["pieces"]}
    small = pieces["4 KiB copies"]
    yield "a layer, one burst up", f"{pieces['one burst']:.1f} GB/s", f"{small:.1f} GB/s in copies of 4 KiB"


def _memory(result: Mapping[str, Any]) -> Iterator[Line]:
    triad, mix = (_best(result["tables"]["passes"], key) for key in ("triad", "adam_mix"))
    yield "STREAM triad", f"{triad['triad']['median']:.1f} GB/s", _where(triad)
    share = _percent(mix["adam_mix"]["median"] / triad["triad"]["median"])
    yield "the update's bytes alone", f"{mix['adam_mix']['median']:.1f} GB/s", f"{share} of the triad, {_where(mix)}"


def _update(result: Mapping[str, Any]) -> Iterator[Line]:
    rows = result["tables"]["adam"]
    for name in dict.fromkeys(row["format"] for row in rows):
        best = _best([row for row in rows if row["format"] == name and row["variant"] != "mix alone"], "mparam_per_s")
        yield (
            f"update, {name}",
            f"{best['mparam_per_s']['median'] / 1e3:.2f} Gparam/s",
            f"{best['gb_per_s']['median']:.1f} GB/s, {_percent(best['of_mix'])} of its bytes alone in the same rounds "
            f"({best['variant']})",
        )


def _threads(result: Mapping[str, Any]) -> Iterator[Line]:
    recommended = result["results"]["recommended_threads"]
    row = next(row for row in result["tables"]["contention"] if row["threads"] == str(recommended))
    kept = min(row["up_kept"], row["down_kept"])
    yield (
        "update threads",
        str(recommended),
        f"recommended: copies keep {_percent(kept)}, updates {_percent(row['updates_kept'])} beside each other",
    )


def _ring(result: Mapping[str, Any]) -> Iterator[Line]:
    backend = result["results"]["backend"]
    for row in result["tables"]["pipeline"]:
        if row["level"] == "the longest":
            yield (
                f"ring, updates {row['updates']}",
                _percent(row["longest_share"]),
                f"longest part / step; {_percent(row['floor_share'])} of what the order allows ({backend})",
            )


def _best(rows: Iterable[Mapping[str, Any]], key: str) -> Mapping[str, Any]:
    return max(rows, key=lambda row: float(row[key]["median"]))


def _where(row: Mapping[str, Any]) -> str:
    return f"{row['place']}, {row['threads']} threads"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"
