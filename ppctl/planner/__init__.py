"""Predictions of a step: operations counted or timed, step time, memory, search of layouts."""
