"""A small engine that truly computes W8A8, on CPU and on CUDA, behind SGLang's HTTP protocol.

Read it in this order: ``kernels`` (quantized matrix products), ``rope``, ``decoder`` (one decoder
and its named buffers), ``cache`` (keys and values), ``native`` (both once more, as one call of
``decode.cpp``), ``sampling``, ``batch_rows`` (what each sequence needs), ``static`` (decode steps
as CUDA graphs), ``engine`` (continuous batching), ``thread``, ``live_weights`` (where an update
writes), ``read_weights`` (folders), ``text_codec``, ``stream`` (a request followed token by token),
``protocol`` and ``openai`` (what clients send and get), ``endpoints``, and ``starting_embedded``
(the command of one that a run starts).
"""
