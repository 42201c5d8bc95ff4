"""A load on one engine as reinforcement learning makes it, driven over HTTP and timed.

lengths    how long the responses are: long-tailed, or those of a recorded run
requests   what is asked, and when: groups of samples on prompts that no cache has seen
protocols  SGLang's and OpenAI's streams, read into one ``Answer``
words      prompts that are the same as text and as token ids
drive      sends the requests, notes when each token comes, publishes in between
guidellm   the same load through another load generator
timeline   makespan, tail, latencies: arithmetic on what was noted
reasons    why a measurement may not be compared with another
"""
