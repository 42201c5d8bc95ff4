"""The engine's end of the rollouts: SGLang's server with our weight loader inside.

    server           the process: hides the API key, chooses a port, ends with the trainer
    loader           the hook that SGLang calls with each message of an update, and where each
                     Hugging Face tensor lives in SGLang's parameters
    cpu_layers       layers that SGLang lacks on a machine without a GPU
    compiling        the compiler for SGLang's kernels
    starting_sglang  the commands of a run's engines, their GPUs and options

All but ``launches`` runs in SGLang's environment, where this package is installed without its
dependencies: torch, orjson, xxhash, psutil and the standard library may be imported, nothing else.
"""
