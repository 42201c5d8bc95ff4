from qurl_megatron.actor.env import keep_out_without_gpu

keep_out_without_gpu()  # before a module of this package imports Megatron
