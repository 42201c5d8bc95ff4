"""A model's tensors as known before one of them is read: which there are, and their parts.

    arch     the sizes and switches of a model, from its config.json
    table    one row per kind of tensor: its shape, how it is split, quantized and folded
    slice    a part of a tensor: where it lies in the whole, and its values

Imports no torch: engines load it inside SGLang's environment.
"""
