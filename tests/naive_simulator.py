"""A deliberately naive simulator: it steps the clock one picosecond at a time and shares no code with the package.

`naive_simulate` returns, per class and task, (ready, start, end), or None if it is not done by the limit. With `slow`, for
each class and task its (held, traffic, memory) in permille, compute and communication that run on one rank at the same time
take parts of each other's pace as `sim.overlap` says; a task ends at the first whole picosecond by which its work is done.
"""

from fractions import Fraction


class Cell:
    """One task of one class, and what has happened to it so far."""

    def __init__(self, program, cls, index):
        self.task, self.cls, self.index = program.tasks[index], cls, index
        self.kind = "comm" if self.task.group >= 0 else program.kind(self.task.stream)
        self.ready = self.start = self.end = self.left = None

    @property
    def runs(self):
        return self.start is not None and self.end is None


def naive_simulate(programs, slow=None, limit=100_000):
    rank = [[Cell(program, cls, i) for i in range(len(program.tasks))] for cls, program in enumerate(programs)]
    cells = [cell for row in rank for cell in row]
    for now in range(limit):
        while any(settle(cell, rank, cells, now) for cell in cells):
            pass
        if all(cell.end is not None for cell in cells):
            return [[(cell.ready, cell.start, cell.end) for cell in row] for row in rank]
        paces = {cell: pace(cell, rank, cells, slow) for cell in cells if cell.runs}
        for cell, work in paces.items():
            cell.left -= work
    return None


def members(cell, cells):
    return [cell] if cell.task.group < 0 else [other for other in cells if other.task.group == cell.task.group]


def settle(cell, rank, cells, now):
    """Lets everything that can happen to a task at `now` happen; True if something did."""
    before = (cell.ready, cell.start, cell.end)
    if cell.runs and cell.left <= 0:
        cell.end = now
    if cell.ready is None and may_start(cell, rank[cell.cls], now):
        cell.ready = now
    together = members(cell, cells)
    if cell.start is None and all(other.ready is not None for other in together):
        for other in together:
            other.start = now
            other.left = Fraction(max(each.task.duration_ps for each in together))
    return before != (cell.ready, cell.start, cell.end)


def may_start(cell, row, now):
    earlier = [other for other in row[: cell.index] if other.task.stream == cell.task.stream]
    if any(other.end is None for other in earlier):
        return False
    return all(row[j].end is not None and row[j].end + lag <= now for j, lag in cell.task.deps)


def pace(cell, rank, cells, slow):
    """Work done in the next picosecond."""
    if slow is None or cell.kind not in ("compute", "comm"):
        return Fraction(1)
    lost = 0
    for mine in members(cell, cells):
        beside = [other for other in rank[mine.cls] if other.runs and {other.kind, cell.kind} == {"compute", "comm"}]
        lost = max(lost, sum(taken(cell, other, cells, slow) for other in beside))
    return 1 - Fraction(min(lost, 900), 1000)


def taken(cell, other, cells, slow):
    """What one task beside it takes from a task's pace, in permille."""
    share = {
        each.kind: [max(slow[m.cls][m.index][i] for m in members(each, cells)) for i in range(3)]
        for each in (cell, other)
    }
    contended = share["comm"][1] * share["compute"][2] // 1000
    return contended + (share["comm"][0] if cell.kind == "compute" else 0)
