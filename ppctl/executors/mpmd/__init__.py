"""The mpmd executor: a compiled function for each stage and kind of task, dispatched by the host in schedule order."""
