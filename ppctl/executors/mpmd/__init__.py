"""The mpmd executor: a program for each stage and kind of task, dispatched in schedule order."""
