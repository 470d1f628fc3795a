"""A schedule as a trace in the Trace Event Format, for ui.perfetto.dev and chrome://tracing."""

from typing import Any

from ppctl.reports.charts.schedule_drawing import KIND_NAMES, Drawing


def trace(drawing: Drawing) -> dict[str, Any]:
    """Return a complete event ("X") for each task, a thread and a memory counter for each rank.

    Times are in microseconds.
    """
    timeline, schedule = drawing.timeline, drawing.schedule
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": drawing.title}}
    ]
    for rank, tasks in enumerate(schedule.ranks):
        # 1. the thread
        thread = {"pid": 0, "tid": rank}
        about = (
            ("thread_name", {"name": f"rank {rank}"}),
            ("thread_sort_index", {"sort_index": rank}),
        )
        events += [{"ph": "M", **thread, "name": name, "args": args} for name, args in about]
        # 2. tasks
        for task in tasks:
            start_s, waited = timeline.start_s[task], timeline.waits_for(task)
            args: dict[str, Any] = {"stage": task.stage, "microbatch": task.microbatch}
            args["chunk"] = schedule.chunk_at(task)
            args |= {"waits_for": str(waited)} if waited else {}
            event = {"ph": "X", **thread, "name": str(task), "cat": KIND_NAMES[task.kind]}
            event |= {"ts": start_s * 1e6, "dur": (timeline.end_s[task] - start_s) * 1e6}
            events.append(event | {"args": args})
        # 3. memory
        counter = {"ph": "C", "pid": 0, "name": f"activations of rank {rank}"}
        for at_s, live in timeline.memory_curve(rank):
            events.append(counter | {"ts": at_s * 1e6, "args": {"activations": live}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
