"""How raw memory maps are to be read: their sizes allow several readings, and the numbers tell which is right."""

from typing import NamedTuple

import numpy as np

from ..errors import KnnlmError
from .raw_files import RawFile

SAMPLED_ROWS = 2000
FEWEST_ROWS, FEWEST_COLUMNS = 200, 8  # for statistics of columns
FEWEST_PAIRED_COLUMNS = 32  # for telling that columns are alike, which a few are by chance
# The standard deviation of log2|x|. Keys have 1.5 to 3. Two float16 numbers read as one float32 have 10 and more,
# because five bits of exponent become the upper five of eight; the lower half of a float32 read as a float16 has 6 to
# 9, because its bits are random.
LARGEST_SPREAD = 5.0
MOST_BAD_ROWS = 0.3
MOST_ZEROS = 0.3  # among the values; 0 is <s>, which is hardly ever predicted
INT16_TOKENS = 1 << 16
PRIMES = (2, 3, 5, 7)
DISTINCT = 8.0  # columns that differ by so many times what chance makes of one column are not the same


class RawLayout(NamedTuple):
    """How the raw files are to be read."""

    entries: int
    dim: int
    key_dtype: str
    value_dtype: str


class Known(NamedTuple):
    """What the user, the index and the checkpoint say; None or empty where they say nothing."""

    dims: dict[str, int] = {}  # who says it -> the dimension
    key_dtype: str | None = None
    entries: int | None = None  # --size
    index_entries: int | None = None

    @property
    def dim(self) -> int | None:
        if len(set(self.dims.values())) > 1:
            claims = ", ".join(f"{who} {dim}" for who, dim in self.dims.items())
            raise KnnlmError(f"the dimension of the keys is not clear ({claims}); give what belongs to one datastore")
        return next(iter(self.dims.values()), None)


def deduce_layout(keys: RawFile, values: RawFile, known: Known, vocabulary_size: int) -> tuple[RawLayout, str]:
    """The one reading of the two files that fits their sizes and holds plausible numbers, and why it is this one."""
    dim = known.dim
    for file in (keys, values):
        if file.bytes and not file.used_bytes():
            raise KnnlmError(f"{file.path} holds nothing but zeros, so the dump never began; dump it again")
    value_dtype = _value_dtype(values, known, vocabulary_size)
    rows = values.bytes // np.dtype(value_dtype).itemsize if value_dtype else 0
    readings = {}
    for key_dtype in [known.key_dtype] if known.key_dtype else ["float16", "float32"]:
        width, rest = divmod(keys.bytes, rows * np.dtype(key_dtype).itemsize) if rows else (0, 1)
        if width and not rest and dim in (None, width):
            readings[key_dtype, width] = _problem_of_keys(keys, key_dtype, width)
    plausible = [reading for reading, problem in readings.items() if not problem]
    if value_dtype is None or not plausible:
        raise _misfit(keys, values, known, readings)
    if len(plausible) > 1:
        # That a dimension is usually a power of two does not help: it is so of all readings, or of none.
        options = " or ".join(f"{width} {dtype}" for dtype, width in plausible)
        raise KnnlmError(f"{keys.path} can be read as keys of {options}; say which with --dtype")
    key_dtype, width = plausible[0]
    reasons = [f"{who} says {dim} dimensions" for who in known.dims]
    reasons += [f"as {width} {dtype} {problem}" for (dtype, width), problem in readings.items() if problem]
    entries = rows if known.entries is None else known.entries
    if entries > rows:
        raise KnnlmError(f"--size {entries:,} is more than the {rows:,} entries of {values.path}; use {rows} or less")
    return RawLayout(entries, width, key_dtype, value_dtype), "; ".join(reasons) or "the sizes of the files fit"


def _misfit(keys: RawFile, values: RawFile, known: Known, readings: dict[tuple[str, int], str]) -> KnnlmError:
    claims = [f"{who} {dim}" if who == "--dim" else f"the {dim} dimensions of {who}" for who, dim in known.dims.items()]
    claims += [f"--dtype {known.key_dtype}"] if known.key_dtype else []
    said = f" with {' and '.join(claims)}" if claims else ""
    why = "; ".join(f"as {width} {dtype} {problem}" for (dtype, width), problem in readings.items())
    return KnnlmError(
        f"{keys.path} ({keys.bytes:,} bytes) and {values.path} ({values.bytes:,} bytes) do not fit together{said}"
        f"{f' ({why})' if why else ''}; check that both belong to one datastore and that none is truncated"
    )


# --- values ---------------------------------------------------------------------------------------------------------


def unsigned(values: np.ndarray) -> np.ndarray:
    """The original's int16 wraps for token numbers from 32768 up."""
    return values.view(np.uint16) if values.dtype == np.int16 else values


def _value_dtype(values: RawFile, known: Known, vocabulary_size: int) -> str | None:
    """The dtype in which all values are tokens; None if the file's size is that of no dtype.

    Narrow integers read as wide ones make numbers beyond every dictionary, so the widest that fits is right.
    """
    sizes = {dtype: np.dtype(dtype).itemsize for dtype in ("int64", "int32", "int16")}
    possible = {dtype: values.bytes // size for dtype, size in sizes.items() if values.bytes % size == 0}
    fitting = {t: rows for t, rows in possible.items() if rows and _holds_tokens(values, t, vocabulary_size)}
    if values.bytes and possible and not fitting:
        raise KnnlmError(
            f"{values.path} does not hold tokens of a dictionary of {vocabulary_size:,} types; give the dict.txt that "
            "it was made with, and check that the file is not damaged"
        )
    told = [dtype for dtype, rows in fitting.items() if rows in (known.entries, known.index_entries)]
    chosen = next(iter([*told, *fitting]), None)
    if chosen == "int16" and vocabulary_size > INT16_TOKENS:
        raise KnnlmError(
            f"{values.path} holds int16 values, in which the {vocabulary_size:,} types of the dictionary have wrapped "
            "around, so tokens are wrong; dump again with int64 values (the original without --dstore-fp16, or "
            "--knn-dump here)"
        )
    return chosen


def _holds_tokens(values: RawFile, dtype: str, vocabulary_size: int) -> bool:
    used = -(-values.used_bytes() // np.dtype(dtype).itemsize)
    sample = unsigned(values.some_rows(dtype, 1, _sample(used))[:, 0])
    if not ((sample >= 0) & (sample < vocabulary_size)).all():
        return False
    return len(sample) <= 20 or float((sample == 0).mean()) <= MOST_ZEROS


# --- keys -----------------------------------------------------------------------------------------------------------


def _sample(rows: int) -> np.ndarray:
    """Numbers of at most 2,000 rows, in order."""
    return np.sort(np.random.default_rng(1).choice(rows, min(rows, SAMPLED_ROWS), replace=False))


def _problem_of_keys(keys: RawFile, dtype: str, width: int) -> str:
    """Why this reading cannot be right, as half a sentence; empty if it can."""
    numbers = _sample(-(-keys.used_bytes() // (width * np.dtype(dtype).itemsize)))
    sample = keys.some_rows(dtype, width, numbers).astype(np.float64)
    sound = np.isfinite(sample).all(axis=1)
    if float(sound.mean()) < 1 - MOST_BAD_ROWS:
        return f"{1 - sound.mean():.0%} of the rows hold NaN or infinite numbers"
    sound &= sample.any(axis=1)
    return _problem_of_spread(sample[sound]) or _problem_of_alignment(sample[sound], numbers[sound])


def _problem_of_spread(sample: np.ndarray) -> str:
    """Even and odd columns by themselves: the halves of a wider number are quite different."""
    for half in (sample[:, ::2], sample[:, 1::2]):
        sizes = np.abs(half[half != 0])
        if half.size and not sizes.size:
            return "every other column is zero"
        spread = float(np.log2(sizes).std()) if sizes.size else 0.0
        if spread > LARGEST_SPREAD:
            return f"the numbers would spread over {spread:.0f} powers of two (standard deviation) instead of 1 to 3"
    return ""


def _problem_of_alignment(sample: np.ndarray, numbers: np.ndarray) -> str:
    """Whether each row seems to hold several keys, or a part of one, as when one of the files is truncated.

    Every column of a key has a mean and a standard deviation of its own, so columns can be recognised: the same ones
    again after half of a row, or other ones in every second row.

    Args:
        sample: (n, width)
        numbers: which rows they are, (n,)
    """
    count, width = sample.shape
    if count < FEWEST_ROWS or width < FEWEST_COLUMNS:
        return ""
    scale = np.maximum(sample.std(axis=0), 1e-3 * np.median(sample.std(axis=0)) + 1e-12)
    halves = [_random_halves(sample, scale, seed) for seed in range(5)]
    chance = float(np.mean([_difference(first, second) for first, second in halves]))
    first, second = halves[0]
    others = float(np.median([_difference(first, np.roll(second, shift, axis=0)) for shift in _shifts(width)]))
    for parts in PRIMES:
        if width % parts == 0 and width >= FEWEST_PAIRED_COLUMNS and others > DISTINCT * chance:
            again = _difference(first, np.roll(second, width // parts, axis=0))
            if again < np.sqrt(chance * others):
                return f"the columns repeat after {width // parts}, as if each row held {parts} keys"
        phases = [_features(sample[numbers % parts == phase], scale) for phase in (0, 1)]
        if _difference(*phases) > DISTINCT * chance * parts / 2:  # with fewer rows than a half, chance makes more
            return f"rows differ from the next as if each key took {parts} rows"
    return ""


def _random_halves(sample: np.ndarray, scale: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The features of two random halves of the rows: how they differ is what chance makes."""
    half = np.random.default_rng(seed).permutation(len(sample)) % 2 == 0
    return _features(sample[half], scale), _features(sample[~half], scale)


def _features(sample: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """By which a column is recognised: its mean and the logarithm of its standard deviation, (width, 2)."""
    means = np.clip(sample.mean(axis=0) / scale, -10, 10)
    return np.stack([means, np.log(np.maximum(sample.std(axis=0), 1e-3 * scale))], axis=1)


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    """Of columns from columns: the median, since a few columns of most models are far from all others."""
    return float(np.median(((one - other) ** 2).sum(axis=1)))


def _shifts(width: int) -> list[int]:
    """Some that are no simple part of the width."""
    return [shift for shift in range(1, min(width, 24)) if width % shift or shift == 1]
