"""One file per command. Its first line holds the help: "`ppctl NAME`: help."

A command that composes a whole config is a function with the file's name: `NAME(config, *, as_json)
-> exit code`. Its module imports JAX. So the module is imported only after the request is checked,
and the help is read from the file as text.

Every other command has `parser()`, which returns its `Parser`, and `serve(options) -> exit code`.
"""
