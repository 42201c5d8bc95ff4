"""A small engine that truly computes W8A8, on CPU and on CUDA, behind SGLang's HTTP protocol.

Read it in this order: ``arch`` (what config.json says), ``kernels`` (quantized matrix products),
``model`` (one decoder and its named buffers), ``cache`` (keys and values), ``native`` (both once
more, as one call of ``decode.cpp``), ``sampling``, ``rows`` (what each sequence needs), ``static``
(decode steps as CUDA graphs), ``engine`` (continuous batching), ``thread``, ``weights`` (validated
updates), ``text``, ``stream`` (a request followed token by token), ``protocol`` and ``openai``
(what clients say and hear), and ``server``.
"""
