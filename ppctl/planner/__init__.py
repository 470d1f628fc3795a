"""What a step will take: operations counted or timed, step time, memory, search of layouts."""
