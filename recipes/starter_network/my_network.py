"""A model of one's own: any JAX function of a batch, cut into layers at its marks."""

import jax
import jax.numpy as jnp

import ppctl


def network(*, width=8, num_classes=4):
    """A small convolutional network for images [examples, 8, 8]. Settings of its own:
    +model.options.width=16.
    """

    def init(key):  # -> parameters: any tree, whose names you meet again in predict.py
        keys = jax.random.split(key, 3)
        return {
            "conv": [conv(keys[0], 1, width), conv(keys[1], width, 2 * width)],
            "head": {
                "w": jax.random.normal(keys[2], (2 * width * 16, num_classes))
                / (2 * width * 16) ** 0.5
            },
        }

    def conv(key, num_in, num_out):
        w = jax.random.normal(key, (3, 3, num_in, num_out)) / (9 * num_in) ** 0.5
        return {"w": w, "bias": jnp.zeros(num_out)}

    def convolved(layer, x, stride):
        names = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            x, layer["w"], (stride, stride), "SAME", dimension_numbers=names
        )
        return jax.nn.relu(x + layer["bias"])

    def apply(params, images):  # each example by itself: no batch norm
        x = convolved(params["conv"][0], images[..., None], 1)
        x = ppctl.stage_boundary(x)  # a layer ends here
        x = convolved(params["conv"][1], x, 2)
        x = ppctl.stage_boundary(x)
        return x.reshape(len(x), -1) @ params["head"]["w"]

    def loss(logits, labels):  # -> sum of losses, number of losses
        logs = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
        found = -jnp.take_along_axis(logs, labels[:, None], axis=-1)
        return found.sum(), jnp.asarray(found.size, found.dtype)

    return ppctl.Network(init, apply, loss)
