"""Data of one's own: an example is a function of its number, so that any run can be repeated and
resumed.
"""

import numpy as np

from ppctl.data.dataset import DataSet, fingerprint, generator

NUM_SAMPLES = 16


def waves(*, batch_size, seed, eval_fraction, num_rows=8192, noise=0.05):
    """Noisy samples of sine waves; targets: amplitude and frequency. Settings of its own:
    +data.options.noise=0.1.
    """
    num_eval = int(eval_fraction * num_rows)
    when = np.linspace(0, 1, NUM_SAMPLES)

    def example(number):
        random = generator(seed, number)
        amplitude, frequency, phase = (
            random.uniform(0.5, 1.5),
            random.uniform(0.5, 1.5),
            random.uniform(0, 0.5),
        )
        wave = amplitude * np.sin(2 * np.pi * (frequency * when + phase))
        return wave + noise * random.standard_normal(NUM_SAMPLES), [amplitude, frequency]

    def read(numbers):  # example numbers [n] -> arrays [n, ...]
        inputs, targets = zip(*(example(number) for number in numbers.tolist()), strict=True)
        return {"inputs": np.array(inputs, np.float32), "targets": np.array(targets, np.float32)}

    return DataSet(
        name="waves",
        source=f"{num_rows} waves of noise {noise}",
        fingerprint=fingerprint(
            name="waves", rule=[num_rows, noise], batch_size=batch_size, seed=seed
        ),
        batch_size=batch_size,
        seed=seed,
        num_examples=num_rows - num_eval,
        num_eval_examples=num_eval,
        read=read,
        input_dim=NUM_SAMPLES,
        target_dim=2,
    )
