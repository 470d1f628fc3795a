"""Time, memory and program sizes of planning and compiling for up to 16,384 described devices."""
