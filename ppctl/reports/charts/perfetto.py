"""A schedule as a trace in the Trace Event Format, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from typing import Any

from ppctl.reports.charts.drawing import KIND_NAMES, Drawing


def trace(drawing: Drawing) -> dict[str, Any]:
    """Return one complete event ("X") for each task, a thread and a counter of activations for each rank.

    Times are in microseconds, as the format asks.
    """
    timeline, schedule = drawing.timeline, drawing.schedule
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": drawing.title}}]
    for rank, tasks in enumerate(schedule.ranks):
        events.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_sort_index", "args": {"sort_index": rank}})
        for task in tasks:
            start_s, waited = timeline.start_s[task], timeline.waits_for(task)
            args = {"stage": task.stage, "microbatch": task.microbatch, "chunk": schedule.chunk_at(task)}
            event = {"ph": "X", "pid": 0, "tid": rank, "name": str(task), "cat": KIND_NAMES[task.kind]}
            event |= {"ts": start_s * 1e6, "dur": (timeline.end_s[task] - start_s) * 1e6}
            events.append(event | {"args": args | ({"waits_for": str(waited)} if waited else {})})
        name = f"activations of rank {rank}"
        events += (
            {"ph": "C", "pid": 0, "name": name, "ts": at_s * 1e6, "args": {"activations": live}}
            for at_s, live in timeline.memory_curve(rank)
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
