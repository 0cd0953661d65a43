"""Which kernel a library picks for a product, as features of a correction: shares of each kernel, and what it chose by.

cuBLAS's choice among a card's SGEMM kernels is a function of the sizes alone. On cards where the kernels differ much (P4: a
rate of one twice that of another at the same shape), a correction that is told the choice errs half as much. Where a source
names the kernel of each row, `calibrate.fit_choice` fits boosted trees to that name; their arrays are stored with the
segment as `choice_<number>_<array>`, one set of trees a kernel, and the shares are

    share of kernel c = exp(trees_c) / sum over all kernels of exp(trees)

The trees see, for each tile: waves over the SMs with one and two blocks resident, padded work, the law's time; and
remainders of the sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from perfmodel.db.device import Device
from perfmodel.kernels.correction import Floats, evaluate_trees

TILES = ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (32, 32), (256, 64), (64, 256))
RESIDENT = (1, 2)  # blocks on an SM at a time
REMAINDERS = ((4, "m"), (4, "n"), (4, "k"), (8, "k"), (16, "k"), (32, "m"), (32, "n"), (32, "k"), (64, "m"), (64, "n"),
              (64, "k"), (128, "m"), (128, "n"))  # fmt: skip
PREFIX = "choice_"


def tile_features(sizes: tuple[Floats, Floats, Floats, Floats], device: Device) -> Floats:
    """Feature matrix [n, f] of products of sizes (m, n, k, batch), each [n]."""
    m, n, k, batch = sizes
    columns: list[Floats] = []
    waves: list[Floats] = []
    for tile_m, tile_n in TILES:
        units = np.ceil(m / tile_m) * np.ceil(n / tile_n) * batch
        columns += [units, units / device.n_sms / np.ceil(units / device.n_sms)]
        columns += [m * n * batch / (units * tile_m * tile_n)]
        for resident in RESIDENT:
            count = np.ceil(units / (device.n_sms * resident))
            columns.append(np.log(count))
            waves.append(np.log(count * resident * tile_m * tile_n))
    stacked = np.stack(waves)
    columns += [wave - waves[0] for wave in waves]
    columns += [stacked.argmin(axis=0).astype(np.float64), stacked.min(axis=0) - np.log(m * n * batch)]
    named = {"m": m, "n": n, "k": k}
    columns += [named[name] % size for size, name in REMAINDERS]
    columns += [m, n, k, np.log(m / n), np.log(k / m), np.log(k / n), np.log(m * n * batch), np.log(m * n * k * batch)]
    return np.column_stack(columns)


def kernel_shares(arrays: Mapping[str, NDArray[np.generic]], features: Floats) -> Floats:
    """Shares [n, kernels] of the kernels whose trees the arrays hold."""
    raw = np.stack([evaluate_trees(_of(arrays, number), features) for number in range(n_kernels(arrays))], axis=1)
    grown = np.exp(raw - raw.max(axis=1, keepdims=True))
    shares: Floats = grown / grown.sum(axis=1, keepdims=True)
    return shares


def n_kernels(arrays: Mapping[str, NDArray[np.generic]]) -> int:
    """How many kernels the arrays tell apart; 0 where nothing was fitted."""
    return sum(name.startswith(PREFIX) and name.endswith("_tree_roots") for name in arrays)


def _of(arrays: Mapping[str, NDArray[np.generic]], number: int) -> dict[str, NDArray[np.generic]]:
    prefix = f"{PREFIX}{number}_"
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def with_choice(
    arrays: Mapping[str, NDArray[np.generic]],
    features: Floats,
    sizes: tuple[Floats, Floats, Floats, Floats],
    device: Device,
) -> Floats:
    """`features` [n, f] with those of the tiles and the kernels' shares behind them, if the arrays have a choice."""
    if n_kernels(arrays) == 0:
        return features
    wide = np.column_stack([features, tile_features(sizes, device)])
    return np.column_stack([wide, kernel_shares(arrays, wide)])
