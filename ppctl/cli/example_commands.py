"""Commands for what people want to do: for `ppctl examples` and the help of each command."""

# a comment and a command each, which a test composes
TEXT = """\
# train a small model on this machine, without an accelerator, in seconds
ppctl train recipes=tiny
# go on with it after Ctrl-C or a crash, or for more steps
ppctl train recipes=tiny run.num_steps=60
# see which runs there are, and how they ended
ppctl runs
# see those that ended alike together, the newest first
ppctl runs --sort status,started:desc
# look at a run, or compare several, on a page to send to others
ppctl report tiny
# train on a text of your own
ppctl train data=text data.path=notes.txt run.name=notes run.num_steps=1000
# train a tokenizer on it, for data.tokenizer=tokenizer
ppctl tokenize notes.txt --vocab-size 4096 --out tokenizer
# take a model of Hugging Face's format, or a GGUF file, to train it on
ppctl import DIR --out runs/imported
# give a model that you trained to others, for transformers
ppctl export tiny --out exported
# let a model go on with a text
ppctl generate tiny --prompt "import " --max-tokens 100 --temperature 0
# know how likely a model finds a text
ppctl evaluate tiny data=text data.path=notes.txt
# know which of several answers it finds likeliest
ppctl evaluate tiny --choices questions.jsonl
# write a custom model and data set to start from, with a recipe that trains them
ppctl init mine
# the same with any JAX function as a model and .npy files as data
ppctl init mine --network
# look at a schedule before choosing it
ppctl schedule show schedule=zb_h1 mesh=1x4
# compare all of them, with assumed costs
ppctl schedule list mesh=1x8 schedule.num_microbatches=32 costs.transfer_s=0.1
# see how the bubble falls with microbatches
ppctl schedule curves schedule=1f1b --ranks 2,4,8,16 --microbatches 1-64
# compare schedules on your number of ranks and microbatches
ppctl schedule compare gpipe 1f1b interleaved zb_v mesh=1x8 schedule.num_microbatches=32
# know beforehand how long a step takes and whether it fits
ppctl plan mesh=2x4 schedule=1f1b hardware=h100 data.batch_size=64
# know it from the ranks' own work, with one accelerator for eight
ppctl rehearse mesh=1x8 schedule=zb_v model.num_layers=16
# let it find the fastest layout for the devices you have
ppctl tune hardware=h100 tune.devices=64 data.batch_size=512
# know it for TPUs that are not attached, by their own compiler
ppctl plan mesh=4x4 data.batch_size=64 plan.topology=v5e:4x4
# try several settings, each in a run of its own
ppctl train --multirun recipes=tiny run.name=sweep schedule=gpipe,1f1b optim.lr=1e-3,3e-3
# be sure that the pipeline trains the same model
ppctl verify recipes=tiny schedule=1f1b
# be sure of it with layers divided by hand, in float64
ppctl verify mesh=1x4 schedule=1f1b partition=explicit partition.layers=[3,2,2,1]
# compare the time and memory of a step with those of the un-pipelined model
ppctl bench mesh=1x4 schedule=gpipe
# check that a machine can train before you leave it alone
ppctl doctor mesh=2x4
# train with several processes that start again after a crash
ppctl train recipes=tiny launch.processes=2 launch.max_restarts=3
# look into the program before it runs: the tasks of each rank in every tick, and transfers
ppctl inspect mesh=1x4 schedule=eager_1f1b
# record what every rank does when, for xprof and Perfetto
ppctl train recipes=tiny run.profile=10
"""
_LINES = TEXT.splitlines()
EXAMPLES = [*zip((line[2:] for line in _LINES[::2]), _LINES[1::2], strict=True)]


def examples_of(command: str) -> list[str]:
    """Return the examples of a command.

    >>> examples_of("tokenize")
    ['ppctl tokenize notes.txt --vocab-size 4096 --out tokenizer']
    """
    return [line for _, line in EXAMPLES if line.split()[1] == command]
