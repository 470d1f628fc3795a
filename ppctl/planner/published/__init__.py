"""The planner held against steps that others have measured and published: `ppctl plan --published FILE`."""
