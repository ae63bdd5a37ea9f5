"""The columns of `values` (n, WIDTH) fp32, one row per token: what is known of it.

z         the row's logits of the softmax; y its target; rho its reference, near enough to max z
LOGPROB   log p[y]; NaN where the target is no token. Before the statistics are finished: z[y]
ENTROPY   -sum_v p[v] log p[v]
REFERENCE rho: z[y], unless p[y] is too small for that
LOGSUM    log sum_v e^(z[v] - rho)
DLOGPROB  the derivative of the loss by LOGPROB, DENTROPY by ENTROPY
SLOPE     the derivative of z[y] by the logit below a softcap
"""

import triton.language as tl

LOGPROB = tl.constexpr(0)
ENTROPY = tl.constexpr(1)
REFERENCE = tl.constexpr(2)
LOGSUM = tl.constexpr(3)
DLOGPROB = tl.constexpr(4)
DENTROPY = tl.constexpr(5)
SLOPE = tl.constexpr(6)
WIDTH = tl.constexpr(7)
