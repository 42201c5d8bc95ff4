"""A small engine that truly computes W8A8, on CPU and on CUDA, behind SGLang's ``/generate``.

Read it in this order: ``kernels`` (quantized matrix products), ``decoder`` (one decoder and the
named buffers that an update writes), ``cache`` (keys and values), ``native`` (both once more, as
one call of ``decode.cpp``), ``sampling``, ``engine`` (continuous batching), ``thread``,
``read_weights`` (folders), ``protocol`` (requests and answers), ``endpoints``, and
``starting_embedded`` (the command of one that a run starts).
"""
