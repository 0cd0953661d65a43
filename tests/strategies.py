"""Random inputs for property tests."""

from hypothesis import strategies as st

from perfmodel.sim import COMM, COMPUTE, COPY, HOST, NO_GROUP, Program, Task

STREAMS = (HOST, COMPUTE, COMM, COPY, 4, -1)


@st.composite
def programs(draw, max_classes=4, max_tasks=12, max_groups=4, crossing=False):
    """Rank programs. Every class meets its collectives in ascending order, so that nothing can deadlock; with
    `crossing`, each in an order of its own.
    """
    n_classes = draw(st.integers(2 if crossing else 1, max_classes))
    n_groups = draw(st.integers(2 if crossing else 0, max_groups)) if n_classes > 1 else 0
    members = [draw(st.sets(st.integers(0, n_classes - 1), min_size=1)) for _ in range(n_groups)]
    mine = [[g for g in range(n_groups) if cls in members[g]] for cls in range(n_classes)]
    return [draw(_program(draw(st.permutations(g)) if crossing else g, max_tasks)) for g in mine]


@st.composite
def _program(draw, groups, max_tasks):
    n = draw(st.integers(max(1, len(groups)), max(max_tasks, len(groups))))
    at = sorted(draw(st.sets(st.integers(0, n - 1), min_size=len(groups), max_size=len(groups))))
    group_at = dict(zip(at, groups, strict=True))
    tasks = []
    for index in range(n):
        deps = draw(st.lists(st.integers(0, index - 1), max_size=3)) if index else []
        tasks.append(
            Task(
                stream=draw(st.sampled_from((COMM, 4, COPY, COMPUTE) if index in group_at else STREAMS)),
                duration_ps=draw(st.integers(0, 20)),
                deps=tuple((dep, draw(st.integers(0, 5))) for dep in deps),
                group=100 + group_at[index] if index in group_at else NO_GROUP,
            )
        )
    return Program(tasks=tasks, n_ranks=draw(st.integers(1, 3)))
