"""Known algorithms, each as the settings of its paper.

An algorithm is a choice of advantage, ratio, clip range, average and penalty, each a small function
in ``algo``. ``algo.name`` fills the choices in; a recipe's own settings win over it, and
``algo.name`` on the command line wins over the recipe. The correction for the quantized behaviour
policy (``algo.objective``) is independent of them.
"""

from typing import Any

ALGORITHMS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, Eq. 3.
    "grpo": {"algo.advantage": "grpo", "algo.aggregation": "response_mean"},
    # Schulman et al. 2017, arXiv:1707.06347; as RLHF uses it: Ouyang et al. 2022,
    # arXiv:2203.02155.
    "ppo": {
        "algo.advantage": "gae",
        "algo.aggregation": "token_mean",
        "algo.kl_in": "reward",
        "algo.kl_estimator": "k1",
    },
    # Yu et al. 2025, arXiv:2503.14476.
    "dapo": {
        "algo.advantage": "grpo",
        "algo.aggregation": "token_mean",
        "algo.clip_low": 0.2,
        "algo.clip_high": 0.28,
        "algo.dynamic_sampling": True,
        "reward.overlong_fraction": 0.2,  # 4096 of 20480 tokens
        "reward.overlong_penalty": 0.5,  # 1 of the 2 from its -1 for wrong to its 1 for right
    },
    # Ahmadian et al. 2024, arXiv:2402.14740.
    "rloo": {
        "algo.advantage": "rloo",
        "algo.aggregation": "response_sum",
        "algo.kl_in": "reward",
        "algo.kl_estimator": "k1",
    },
    # Liu et al. 2025, arXiv:2503.20783.
    "dr_grpo": {"algo.advantage": "dr_grpo", "algo.aggregation": "constant"},
    # Hu et al. 2025, arXiv:2501.03262.
    "reinforce_pp": {
        "algo.advantage": "reinforce_pp",
        "algo.aggregation": "token_mean",
        "algo.kl_in": "reward",
        "algo.kl_estimator": "k1",
    },
    # Hu et al. 2025, arXiv:2501.03262, the variant with several responses per prompt.
    "reinforce_pp_baseline": {
        "algo.advantage": "reinforce_pp_baseline",
        "algo.aggregation": "token_mean",
        "algo.kl_in": "loss",
        "algo.kl_estimator": "k2",
    },
    # Zheng et al. 2025, arXiv:2507.18071.
    "gspo": {
        "algo.advantage": "grpo",
        "algo.aggregation": "response_mean",
        "algo.ratio": "sequence",
        "algo.clip_low": 3e-4,
        "algo.clip_high": 4e-4,
    },
    # MiniMax 2025, arXiv:2506.13585, Eq. 4.
    # The paper tunes the upper bound alone and does not print it. Khatri et al. 2025
    # (arXiv:2510.13786) find that results do not depend on it from 4 to 8; 5 lies between.
    "cispo": {
        "algo.advantage": "grpo",
        "algo.aggregation": "token_mean",
        "algo.surrogate": "cispo",
        "algo.clip_low": 1.0,
        "algo.clip_high": 4.0,
    },
}
