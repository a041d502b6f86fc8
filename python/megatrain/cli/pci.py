"""What the kernel says of a GPU's place on the PCI bus."""

from pathlib import Path

_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
"""By GT/s a lane."""


def link(address: str, devices: Path = Path("/sys/bus/pci/devices")) -> str:
    """Generation and width of the link of a device such as 0000:3b:00.0, now and at most, and its NUMA node. A link
    at rest may be slower than under load."""
    folder = devices / address
    now, most = (_speed_and_width(folder, word) for word in ("current", "max"))
    if now is None:
        return "link not told by the kernel"
    text = f"PCIe {now}" if most in (None, now) else f"PCIe {now} (at most {most})"
    node = _read(folder / "numa_node")
    return text if node in (None, "-1") else f"{text}, NUMA node {node}"


def _speed_and_width(folder: Path, word: str) -> str | None:
    speed, width = _read(folder / f"{word}_link_speed"), _read(folder / f"{word}_link_width")
    if not speed or not width or not speed[0].isdigit():
        return None
    rate = speed.split()[0]
    generation = _GENERATIONS.get(rate)
    return f"{f'gen {generation}' if generation else f'{rate} GT/s'} x{width}"


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
