from qurl_megatron.config.env import keep_out_without_gpu

keep_out_without_gpu()  # before a module of this package imports Megatron
