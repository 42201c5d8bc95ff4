"""For fork servers: the stand-in, and after it the modules that ranks would import one by one."""

from tests.support.transformer_engine import install

install()

import qurl_megatron.training.train  # noqa: E402, F401
