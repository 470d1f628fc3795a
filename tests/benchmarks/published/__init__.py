"""The planner's predictions next to steps that others have measured and published
(docs/published.md).
"""
