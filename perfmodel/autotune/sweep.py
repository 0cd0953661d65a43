"""Every candidate of a space in a table: on many processes through joblib, resumable, the same table whatever happened.

Answers go to a journal beside the table as they come, a line each; a sweep that is started again reads it and asks for what is
missing. The table is written whole at the end, in the order of the space.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from perfmodel.api import Predictor, RunOptions
from perfmodel.autotune.space import Candidate, Refused
from perfmodel.errors import ConfigError, PerfModelError
from perfmodel.heap import uncollected

Detail = Literal["quick", "full"]
Backend = Literal["loky", "threading", "sequential", "dask", "ray"]
COLUMNS = (
    "plan", "micro_batch", "status", "iteration_time_s", "low_s", "high_s", "samples_per_s", "memory_bytes", "is_exact",
    "reason",
)  # fmt: skip
CHUNK = 16  # candidates of a task: neighbours in a space share what follows from one graph
TABLES = (".csv", ".parquet")
Row = dict[str, Any]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What all rows have in common, as plain values: a model and a machine by name, file or mapping, and `RunOptions`.

    With `detail` "quick" a row has the plan's evaluation, the prediction's own time where `is_exact` and else within 0.1 % of
    it; with "full" the prediction.
    """

    model: str | Mapping[str, Any]
    topology: str | Mapping[str, Any]
    options: Mapping[str, Any]
    detail: Detail = "quick"

    def text(self) -> str:
        """The subject as JSON: equal subjects have equal text."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Who answers: a joblib backend and how many processes. `scheduler`: address of a Dask scheduler; None: started here."""

    backend: Backend = "loky"
    n_jobs: int = 1
    scheduler: str | None = None


def sweep(
    subject: Subject,
    found: Sequence[Candidate | Refused],
    table: Path,
    workers: Workers,
    *,
    progress: Progress | None = None,
) -> list[Row]:
    """The rows of all candidates, also written to `table` (`.csv` or `.parquet`).

    Raises:
        ConfigError: a table of another kind or in a place that cannot be written, a journal of another sweep, or a backend
            that is not installed.
    """
    if table.suffix not in TABLES:
        raise ConfigError(f"{table}: found {table.suffix or 'no ending'}, allowed {', '.join(TABLES)}")
    candidates = [row for row in found if isinstance(row, Candidate)]
    journal = Journal(table, subject, candidates)
    rows = journal.read()
    missing = [number for number in range(len(candidates)) if number not in rows]
    done = len(rows)
    with journal.appending() as keep:
        for chunk in _answers(subject, [(n, candidates[n]) for n in missing], workers):
            rows |= dict(chunk)
            keep(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, len(candidates))
    answers = [rows[number] for number in range(len(candidates))]
    refused = [_refusal(row.label, row.reason) for row in found if isinstance(row, Refused)]
    write_table(table, [*answers, *refused])
    journal.path.unlink(missing_ok=True)
    return [*answers, *refused]


def _answers(
    subject: Subject, missing: Sequence[tuple[int, Candidate]], workers: Workers
) -> Iterator[list[tuple[int, Row]]]:
    from joblib import Parallel, delayed

    chunks = [missing[at : at + CHUNK] for at in range(0, len(missing), CHUNK)]
    text = subject.text()
    round_size = max(4 * workers.n_jobs, 1)  # tasks handed out before their answers are kept
    with _backend(workers):
        for at in range(0, len(chunks), round_size):
            tasks = (delayed(answer)(text, chunk) for chunk in chunks[at : at + round_size])
            yield from Parallel(n_jobs=workers.n_jobs, batch_size=1)(tasks)


def answer(subject_text: str, chunk: Sequence[tuple[int, Candidate]]) -> list[tuple[int, Row]]:
    """(number, row) of each candidate of a task; what workers run."""
    subject = Subject(**json.loads(subject_text))
    predictor = _predictor(subject_text)
    with uncollected():
        return [(number, _row(subject, predictor, candidate)) for number, candidate in chunk]


@lru_cache(maxsize=2)
def _predictor(subject_text: str) -> Predictor:
    """A process's predictor of a subject: tasks find what earlier ones left."""
    subject = Subject(**json.loads(subject_text))
    options: RunOptions = dict(subject.options)  # type: ignore[assignment]  # RunOptions went into the subject
    return Predictor(subject.model, subject.topology, **options)


def _row(subject: Subject, predictor: Predictor, candidate: Candidate) -> Row:
    try:
        if subject.detail == "full":
            p = predictor.predict(candidate.spec(), batch=candidate.micro_batch)
            time_s, samples, exact = p.iteration_time_s, p.batch_per_rank * p.replicas, True
            memory, low_s, high_s = p.memory_bytes, p.low_s, p.high_s
        else:
            found = predictor.evaluate(candidate.spec(), batch=candidate.micro_batch)
            time_s, samples, exact = found.iteration_time_s, found.samples, found.is_exact
            memory, low_s, high_s = found.memory_bytes, None, None
    except PerfModelError as error:
        return _refusal(candidate.label, " ".join(str(error).split()), candidate)
    return {
        "plan": candidate.plan,
        "micro_batch": candidate.micro_batch,
        "status": "ok",
        "iteration_time_s": time_s,
        "low_s": low_s,
        "high_s": high_s,
        "samples_per_s": samples / time_s,
        "memory_bytes": memory,
        "is_exact": exact,
        "reason": "",
    }


def _refusal(label: str, reason: str, candidate: Candidate | None = None) -> Row:
    plan, _, micro = label.partition(" micro_batch=")
    row: Row = dict.fromkeys(COLUMNS)
    batch = candidate.micro_batch if candidate else int(micro)
    return row | {"plan": plan, "micro_batch": batch, "status": "refused", "reason": reason}


def _backend(workers: Workers) -> Any:
    """A context in which joblib uses the backend. Raises ConfigError if it is not installed."""
    import joblib

    try:
        if workers.backend == "dask":
            return _dask(workers)
        if workers.backend == "ray":
            import_module("ray.util.joblib").register_ray()
        return joblib.parallel_config(backend=workers.backend, inner_max_num_threads=_inner(workers))
    except ImportError as error:
        raise ConfigError(
            f"backend {workers.backend}: {error.name} is not installed; pip install 'perfmodel[{workers.backend}]'"
        ) from error


def _inner(workers: Workers) -> int | None:
    return 1 if workers.backend == "loky" else None


class _dask:  # noqa: N801 -- used as a function
    """joblib on Dask: a client of the scheduler given, or of a LocalCluster of one-threaded processes."""

    def __init__(self, workers: Workers) -> None:
        distributed: Any = import_module("distributed")
        self._joblib = import_module("joblib")
        self._cluster: Any = None
        if workers.scheduler is None:
            self._cluster = distributed.LocalCluster(
                n_workers=workers.n_jobs, threads_per_worker=1, processes=True, dashboard_address=None
            )
        self._client: Any = distributed.Client(self._cluster if self._cluster is not None else workers.scheduler)

    def __enter__(self) -> None:
        self._config = self._joblib.parallel_config(backend="dask")
        self._config.__enter__()

    def __exit__(self, *_: object) -> None:
        self._config.__exit__(*_)
        self._client.close()
        if self._cluster is not None:
            self._cluster.close()


class Journal:
    """Answers on disk while a sweep runs: a first line that says which sweep, then a line (number, row) each."""

    def __init__(self, table: Path, subject: Subject, candidates: Sequence[Candidate]) -> None:
        self.path = table.with_name(table.name + ".journal")
        digest = hashlib.sha256(subject.text().encode())
        for candidate in candidates:
            digest.update(candidate.label.encode() + b"\0")
        self._title = json.dumps({"sweep": digest.hexdigest()})

    def read(self) -> dict[int, Row]:
        """Rows by number. A last line that was cut off is left out. Raises ConfigError for another sweep's journal."""
        if not self.path.exists():
            return {}
        lines = self.path.read_text(encoding="utf-8").split("\n")
        if lines[0] != self._title:
            raise ConfigError(f"{self.path}: belongs to another sweep; remove it, or write to another table")
        whole = lines[1:-1]  # what follows the last line break is no whole line
        return dict(map(json.loads, whole))

    def appending(self) -> _Appender:
        """A context whose value keeps (number, row) pairs."""
        return _Appender(self.path, self._title)


class _Appender:
    def __init__(self, path: Path, title: str) -> None:
        self._path, self._title = path, title

    def __enter__(self) -> Callable[[Sequence[tuple[int, Row]]], None]:
        try:
            if self._path.exists():
                text = self._path.read_bytes()
                self._path.write_bytes(text[: text.rfind(b"\n") + 1])  # without a line that was cut off
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot write: {error.strerror}") from error
        if not self._file.tell():
            self._file.write(self._title + "\n")
        return self._keep

    def _keep(self, rows: Sequence[tuple[int, Row]]) -> None:
        self._file.writelines(json.dumps(row) + "\n" for row in rows)
        self._file.flush()
        os.fsync(self._file.fileno())

    def __exit__(self, *_: object) -> None:
        self._file.close()


def write_table(path: Path, rows: Sequence[Row]) -> None:
    """Writes rows as CSV, or as Parquet by the file's ending, whole or not at all. Raises ConfigError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        if path.suffix == ".parquet":
            _write_parquet(partial, rows)
        else:
            text = io.StringIO()
            writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
            partial.write_text(text.getvalue(), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot write: {error.strerror}") from error


def _write_parquet(path: Path, rows: Sequence[Row]) -> None:
    try:
        pa: Any = import_module("pyarrow")
        pq: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError("a .parquet table needs pyarrow: pip install 'perfmodel[sweep]', or write .csv") from error
    kinds = {
        "plan": pa.string(),
        "micro_batch": pa.int64(),
        "status": pa.string(),
        "memory_bytes": pa.int64(),
        "is_exact": pa.bool_(),
        "reason": pa.string(),
    }
    columns = {name: pa.array([row[name] for row in rows], kinds.get(name, pa.float64())) for name in COLUMNS}
    pq.write_table(pa.table(columns), path)
