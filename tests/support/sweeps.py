"""Results of a sweep over shapes, as `rlplus-bench` writes them."""

from typing import Any


def swept(ratios: dict[tuple[int, int, int], float]) -> dict[str, Any]:
    """A result with a sweep over shapes (N, H, V), as it stands in a file."""
    cases = []
    for (N, H, V), value in ratios.items():
        rows = [
            {"method": name, "rho": 1.0, "status": "ok", "extra_mb": 3.0, "page_faults": faults}
            | {key: dict.fromkeys(("median", "least", "greatest"), number) for key in ("ms", "ratio")}
            for name, number, faults in (("bare-3u", 1.0, 0), ("cpp 40 MB", value, 7))
        ]
        cases.append({"name": "sweep", "N": N, "H": H, "V": V, "dtype": "bfloat16", "rounds": 5, "rows": rows})
    about = {"instructions": "AVX2", "bf16_instructions": False}
    return {"device": "x", "hardware": about, "threads": 1, "versions": {"torch": "2"}, "cases": cases}


SWEPT = {(512, 448, 16_000): 1.56, (256, 448, 16_000): 1.31, (512, 224, 16_000): 1.875, (1024, 448, 16_000): 1.125}
