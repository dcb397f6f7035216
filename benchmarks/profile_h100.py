"""Derives the profile `h100-8b` from published figures: `python -m benchmarks.profile_h100` prints it.

Throughputs of Llama 3.1 8B in FP8 on one H100 SXM 80 GB with every request there from the start, from NVIDIA's overview
of TensorRT-LLM 1.0 (docs/source/performance/perf-overview.md in that repository).
"""

from __future__ import annotations

import itertools

import numpy as np

PUBLISHED = {  # (tokens in, tokens out): output tokens a second
    (128, 128): 28_312,
    (128, 2048): 22_714,
    (128, 4096): 14_325,
    (500, 2000): 17_660,
    (1000, 1000): 15_220,
    (1000, 2000): 13_899,
    (2048, 128): 3_450,
    (2048, 2048): 9_305,
    (5000, 500): 3_459,
    (20_000, 2000): 1_351,
}
NAMES = ("prefill_token", "decode", "kv_token", "pair")
WEIGHTS, BANDWIDTH = 8.03e9, 3.35e12  # bytes in FP8; bytes a second (NVIDIA's data sheet of the H100 SXM)
FIXED = WEIGHTS / (0.8 * BANDWIDTH) + 1e-3
KV_TOKENS = 860_320 * 0.9 / 0.8  # issue 6294 of the same repository: 860,320 at 80% of what the weights leave
SEATS = 4096


def least_squares(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The non-negative solution, over all choices of coefficients that are not zero."""
    best, best_error = np.zeros(rows.shape[1]), np.inf
    for size in range(1, rows.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(rows.shape[1]), size)):
            found = np.linalg.lstsq(rows[:, chosen], wanted, rcond=None)[0]
            error = float(np.linalg.norm(rows[:, chosen] @ found - wanted))
            if (found >= 0).all() and error < best_error:
                best, best_error = np.zeros(rows.shape[1]), error
                best[chosen] = found
    return best


def main() -> None:
    rows, wanted = [], []
    for (given, made), speed in PUBLISHED.items():
        seconds = made / speed  # of the device, for one request
        context = given + made / 2
        batch = min(KV_TOKENS / context, SEATS)
        rows.append(np.array([given, made, made * context, given**2 / 2]) / seconds)
        wanted.append(1 - FIXED * made / batch / seconds)
    rows, wanted = np.array(rows), np.array(wanted)
    found = least_squares(rows, wanted)
    print(f"fixed = {FIXED:.3g}")
    for name, value in zip(NAMES, found, strict=True):
        print(f"{name} = {value:.3g}")
    for (given, made), off in zip(PUBLISHED, rows @ found - wanted, strict=True):
        print(f"{given:6} in {made:5} out: {off:+.1%}")


if __name__ == "__main__":
    main()
