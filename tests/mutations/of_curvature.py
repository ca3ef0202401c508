"""Representations of G, solving with them, the plan of `Auto`, and what a step costs."""

from __future__ import annotations

from .mutations import mutation

STEP = "tests/optimizer/test_step.py"
DENSE = "tests/curvature/test_dense.py"
GRAM = "tests/curvature/test_gram.py"
REGULARISED = "tests/curvature/test_regularised.py"
ROUNDING = "tests/curvature/test_rounding.py"
SOLVE = "tests/curvature/test_solve.py"
PRIMAL = "tests/curvature/test_contract.py::test_every_case"
FREE = "tests/curvature/test_matrix_free.py"
GRADIENTS = "tests/curvature/test_conjugate_gradients.py"
KRONECKER = "tests/curvature/test_kronecker.py"
SCALED = "tests/curvature/test_kronecker_damping.py"
EKFAC = "tests/curvature/test_ekfac.py"
HESSIAN = "tests/curvature/test_hessian.py"
AUTO = "tests/curvature/test_auto.py"
WORK = "tests/curvature/test_auto_work.py"
COST = "tests/curvature/test_cost.py"
RANK = "tests/parts/test_damping.py::test_what_the_mean_eigenvalue_divides_by"
OUTLIER = "tests/optimizer/test_judgement.py::test_an_outlier_leaves_the_running_average"
SLOPE = "tests/optimizer/test_judgement.py::test_slope_is_the_gradient_in_the_metric_of_the_damping"

MUTATIONS = [
    # dense
    mutation(
        "curvature: dense in the units of the sum",
        "G.mul_(scale) g.mul_(scale)",
        "g.mul_(scale)",
        DENSE,
        PRIMAL,
    ),
    mutation(
        "curvature: the gradient of dense without what is not Su",
        "return whole, g if h is None else g + h",
        "return whole, g",
        REGULARISED,
        DENSE,
    ),
    mutation(
        "curvature: the first batch lingers in the average",
        "self._weight = (k / (k + 2)).clamp(max=self.beta) *",
        "self._weight = self.beta *",
        DENSE,
    ),
    mutation(
        "curvature: the average has no limit to its memory",
        "self._weight = (k / (k + 2)).clamp(max=self.beta) *",
        "self._weight = (k / (k + 2)) *",
        DENSE,
    ),
    mutation(
        "curvature: an outlier stays in the average",
        '* trusted(past["G"].diagonal(), G.diagonal())',
        "* 1.0",
        OUTLIER,
        DENSE,
    ),
    mutation(
        "curvature: an average on the same data too",
        "self._keeps = self.beta > 0 and not same_data",
        "self._keeps = self.beta > 0",
        DENSE,
    ),
    mutation(
        "curvature: G in float32 is always enough",
        "eps * size <= 1e-3, self._in_coordinates(D), s)",
        "eps * size <= 1e30, self._in_coordinates(D), s)",
        ROUNDING,
        DENSE,
    ),
    mutation(
        "curvature: half of the blocks between layers are lost",
        "G[q, p] += product[across, along].T",
        "G[q, p] += 0 * product[across, along].T",
        DENSE,
        PRIMAL,
    ),
    mutation(
        "curvature: dense of a large model without u",
        "self._add(g, [left], left.pull(u.flatten()))",
        "self._add(g, [left], 0 * left.pull(u.flatten()))",
        DENSE,
        PRIMAL,
    ),
    # gram
    mutation(
        "curvature: the slope of gram with half of the overlap",
        "steep = steep - 2 * (u @ moved).to(outer)",
        "steep = steep - (u @ moved).to(outer)",
        SLOPE,
        REGULARISED,
        GRAM,
    ),
    mutation(
        "curvature: gram adds what the gradient alone moves",
        "right = -u if moved is None else -u - moved",
        "right = -u if moved is None else -u + moved",
        REGULARISED,
        GRAM,
    ),
    mutation(
        "curvature: the step of gram without what is not Su",
        "d += plain Kw += moved",
        "Kw += moved",
        REGULARISED,
        GRAM,
    ),
    mutation(
        "curvature: the diagonal blocks of K are left out",
        "return j >= i if ahead == 0 else",
        "return j > i if ahead == 0 else",
        GRAM,
    ),
    mutation(
        "curvature: any rounding is good enough for gram",
        "error(size) <= ROUNDING * length",
        "error(size) <= 1e30 * length",
        ROUNDING,
        GRAM,
    ),
    mutation(
        "curvature: gram damps where λ is 0",
        "A.scale.where(A.scale > 0, 1e-12 * K",
        "A.scale.where(A.scale > 0, 1e-2 * K",
        GRAM,
        PRIMAL,
        "tests/curvature/test_contract.py",
    ),
    mutation(
        "curvature: u of gram without its units",
        "self.u = (lin.ranks.gather(u) if several else u) * self.root",
        "self.u = (lin.ranks.gather(u) if several else u) * 1.0",
        PRIMAL,
        GRAM,
    ),
    # solving
    mutation(
        "curvature: the damping stays in G",
        "finally: diagonal.copy_(kept)",
        "finally:\n        diagonal.copy_(diagonal)",
        SOLVE,
        DENSE,
        STEP,
    ),
    mutation(
        "curvature: a solution in other units",
        "return (x * s).to(b.dtype)",
        "return x.to(b.dtype)",
        SOLVE,
        DENSE,
    ),
    mutation(
        "curvature: refinement goes in the wrong directions",
        "p = z.add(p, alpha=changed / rz)",
        "p = z.add(p, alpha=-changed / rz)",
        SOLVE,
        ROUNDING,
        DENSE,
    ),
    mutation(
        "curvature: a norm that is too small by far",
        "length: Tensor = torch.linalg.vector_norm(v) return length",
        "length: Tensor = 1e-3 * torch.linalg.vector_norm(v)\n    return length",
        SOLVE,
        ROUNDING,
        DENSE,
    ),
    # conjugate gradients
    mutation(
        "curvature: conjugate gradients stop at k times less progress",
        "(phis[i] - phis[i - k]) / phis[i] < k * tolerance",
        "(phis[i] - phis[i - k]) / phis[i] < tolerance",
        GRADIENTS,
        FREE,
    ),
    mutation(
        "curvature: conjugate gradients look back one step",
        "k = max(10, math.ceil(0.1 * i))",
        "k = max(1, math.ceil(0.1 * i))",
        GRADIENTS,
        FREE,
    ),
    mutation(
        "curvature: φ without half of the residual",
        "phis.append(-0.5 * (gx + xr))",
        "phis.append(-0.5 * (gx - xr))",
        GRADIENTS,
        FREE,
    ),
    mutation("curvature: steepest descent", "p.mul_(rz / old).add_(z)", "p.copy_(z)", GRADIENTS, FREE),
    mutation(
        "curvature: negative curvature goes unnoticed",
        "if pHp <= 0: curved = True",
        "if pHp == 0:\n            curved = True",
        GRADIENTS,
        FREE,
        HESSIAN,
    ),
    mutation(
        "curvature: any start is better than none",
        "if sx > sr and sx + sr > 0:",
        "if True:",
        GRADIENTS,
        FREE,
    ),
    mutation(
        "curvature: xᵀHx of an iterate",
        "return [*iterates, Iterate(x, i, gx, gx - xr)], curved",
        "return [*iterates, Iterate(x, i, gx, gx + xr)], curved",
        GRADIENTS,
        FREE,
    ),
    mutation(
        "curvature: conjugate gradients start from all of the last step",
        "options.warm * self._start.to(g)",
        "self._start.to(g)",
        FREE,
    ),
    mutation(
        "curvature: backtracking to the worse iterate",
        "if least < math.inf and not f < least:",
        "if least < math.inf and f < least:",
        FREE,
    ),
    mutation(
        "curvature: a preconditioner without its exponent",
        ".pow_(self.options.precondition)",
        ".pow_(1.0)",
        FREE,
    ),
    mutation(
        "curvature: a sum of estimates for their mean",
        "trace = trace + self.quadratic(v) / probes",
        "trace = trace + self.quadratic(v)",
        FREE,
    ),
    mutation(
        "curvature: the size of a Hessian is its trace",
        "return torch.maximum(trace.abs(), square.sqrt())",
        "return trace.abs()",
        FREE,
        HESSIAN,
    ),
    mutation(
        "curvature: the model of the step has damping in it",
        "xGx = taken.xHx - xAx",
        "xGx = taken.xHx",
        FREE,
        STEP,
    ),
    mutation(
        "curvature: gᵀd with the sign of gᵀx",
        "torch.tensor([-self._known[1], self._known[2]]",
        "torch.tensor([self._known[1], self._known[2]]",
        FREE,
        STEP,
    ),
    # Kronecker factors
    mutation(
        "curvature: π the other way round",
        "pi = (right.mean / left.mean)",
        "pi = (left.mean / right.mean)",
        SCALED,
        KRONECKER,
    ),
    mutation(
        "curvature: λ for its root in the left factor",
        "self.c_left, self.c_right = lam.sqrt() / pi",
        "self.c_left, self.c_right = lam / pi",
        SCALED,
        KRONECKER,
    ),
    mutation(
        "curvature: Kronecker in the units of the sum",
        "(A, B) if sums.table else (B, A)",
        "(A, B / scale) if sums.table else (B / scale, A)",
        KRONECKER,
    ),
    mutation(
        "curvature: Kronecker averages without limit",
        "weight = (1 - 1 / self._count.to(self.parameters.dtype)).clamp(max=self.decay)",
        "weight = 1 - 1 / self._count.to(self.parameters.dtype)",
        KRONECKER,
        EKFAC,
    ),
    mutation(
        "curvature: batches in the Kronecker averages are not counted",
        'self._earlier, self._count = past, past["count"] + 1',
        'self._earlier, self._count = past, past["count"]',
        KRONECKER,
    ),
    mutation(
        "curvature: a decomposition is kept for one step too long",
        'int(past["age"]) + 1 < self.every',
        'int(past["age"]) + 1 <= self.every',
        KRONECKER,
    ),
    mutation(
        "curvature: products of steps without the units of the loss",
        "self.lin.scale * (rows @ rows.T)",
        "rows @ rows.T",
        KRONECKER,
        "tests/parts/test_momentum.py",
    ),
    mutation(
        "curvature: an outlier stays in the Kronecker factors",
        "share = weight * trusted(diagonal(old).flatten(), diagonal(new).flatten()).to(new)",
        "share = weight",
        OUTLIER,
        KRONECKER,
        EKFAC,
    ),
    mutation(
        "curvature: a spectrum without its damping",
        "total = self.e[:, :, None] + c",
        "total = self.e[:, :, None] + 0 * c",
        KRONECKER,
    ),
    mutation(
        "curvature: a full factor without the units of the parameters",
        "return s * torch.cholesky_solve(s * X, L), info.any()",
        "return torch.cholesky_solve(s * X, L), info.any()",
        KRONECKER,
    ),
    mutation(
        "curvature: a diagonal factor undamped",
        "return (s * s * values).to(X.dtype) * X",
        "return (s * s).to(X.dtype) * X",
        KRONECKER,
    ),
    # EKFAC
    mutation(
        "curvature: second moments of the last piece alone",
        "basis.s = basis.s + self.lin.scale * block.second_moments",
        "basis.s = 0 * basis.s + self.lin.scale * block.second_moments",
        EKFAC,
    ),
    mutation(
        "curvature: second moments in the units of the sum",
        "basis.s = basis.s + self.lin.scale * block.second_moments",
        "basis.s = basis.s + block.second_moments",
        EKFAC,
    ),
    mutation(
        "curvature: weight decay in a basis without its square",
        "left, right = (None if Q is None else Q.square() for Q in (basis.left, basis.right))",
        "left, right = basis.left, basis.right",
        EKFAC,
        REGULARISED,
    ),
    mutation(
        "curvature: the diagonal of EKFAC without the square of its basis",
        "left, right = (None if Q is None else Q.square() for Q in (self.left, self.right))",
        "left, right = self.left, self.right",
        EKFAC,
    ),
    mutation(
        "curvature: an outlier stays in the second moments",
        'self._mixed(f"s of {self._name(layer)}", s, lambda s: s)',
        'self._mixed(f"s of {self._name(layer)}", s, torch.ones_like)',
        OUTLIER,
        EKFAC,
    ),
    # Hessian
    mutation(
        "curvature: a Hessian in the units of the sum",
        "lin.ranks.sum_later(self.G * lin.scale)()",
        "lin.ranks.sum_later(self.G * 1.0)()",
        HESSIAN,
    ),
    mutation(
        "curvature: the trace of a Hessian with its signs",
        "return self.diagonal().abs().sum()",
        "return self.diagonal().sum()",
        HESSIAN,
    ),
    mutation(
        "curvature: a pivot that is all rounding has a sign",
        "(smallest > len(H) * torch.finfo(H.dtype).eps)",
        "(smallest > 0)",
        HESSIAN,
    ),
    mutation(
        "curvature: a Hessian that is not symmetric passes",
        "if not bool((H - H.T).norm() > tolerances.of_symmetry(coarsest) * H.norm()):",
        "if True:",
        HESSIAN,
    ),
    # what all of them have
    mutation(
        "curvature: the model of the step without weight decay",
        "return gd, dGd if self.decay is None else dGd + self.decay.quadratic(d)",
        "return gd, dGd",
        REGULARISED,
        "tests/optimizer/test_weight_decay.py",
    ),
    mutation(
        "curvature: the past is trusted the other way round",
        "(MEMORY * (present.sum(-1) / past.sum(-1)))",
        "(MEMORY * (past.sum(-1) / present.sum(-1)))",
        OUTLIER,
        "tests/parts/test_kronecker_metric.py",
    ),
    mutation(
        "curvature: the rank is the number of parameters",
        "return min(self.lin.n, self.lin.most)",
        "return self.lin.n",
        RANK,
    ),
    mutation(
        "curvature: vᵀHv without its damping",
        "return self.quadratic(v) + damping.quadratic(v, self.parameters.sizes, self.parameters.dot)",
        "return self.quadratic(v)",
        STEP,
        "tests/curvature/test_contract.py",
    ),
    mutation(
        "curvature: the slope without its metric",
        'metric of D""" g = self.gradient return self.parameters.dot(g, D.solve(g.clone(), self.parameters.sizes))',
        'metric of D"""\n        g = self.gradient\n        return self.parameters.dot(g, g)',
        SLOPE,
    ),
    # the plan and its cost
    mutation(
        "curvature: dense where there are more parameters than rows",
        "primal = (s.n <= s.m or not s.single)",
        "primal = (s.n > s.m or not s.single)",
        AUTO,
    ),
    mutation(
        "curvature: a plan of twice the memory",
        "way.cost.bytes <= budget]",
        "way.cost.bytes <= 2 * budget]",
        AUTO,
    ),
    mutation(
        "curvature: a second row for any work",
        "<= (self._most if s.R == 1 else most)",
        "<= self._most",
        WORK,
    ),
    mutation(
        "curvature: only the fewest rows pay",
        "enough = next(i for i, cost in enumerate(costs) if cost <= SAVES * min(costs))",
        "enough = next(i for i, cost in enumerate(costs) if cost <= min(costs))",
        WORK,
    ),
    mutation(
        "curvature: as many sampled rows as there are",
        "k = 1 << (s.R - 1).bit_length() >> 1 if s.R > 1 else 0",
        "k = 1 << s.R.bit_length() >> 1 if s.R > 1 else 0",
        WORK,
    ),
    mutation(
        "curvature: rows of a part of the samples, fewer than needed",
        "while s.N // part >= FEWEST and",
        "while s.N // part >= 1 and",
        WORK,
    ),
    mutation(
        "curvature: nothing is quick",
        "most == WORK) and seconds <= QUICK:",
        "most == WORK) and seconds <= 0 * QUICK:",
        WORK,
    ),
    mutation(
        "curvature: rows are cut on the same data",
        "if steady or in_gradients(s, way.cost, whole)",
        "if in_gradients(s, way.cost, whole)",
        WORK,
    ),
    mutation(
        "curvature: a plan that memory did not suffice for is made again",
        "whole=plan.whole, squeeze=plan.squeeze + 1,",
        "whole=plan.whole, squeeze=plan.squeeze,",
        AUTO,
    ),
    mutation(
        "curvature: the average takes no memory",
        "matrices = (4 + (self.inertia > 0)) * s.n**2",
        "matrices = 4 * s.n**2",
        COST,
        AUTO,
    ),
    mutation(
        "curvature: chunks of gram cost nothing more",
        "again = 1 if pieces == 1 else (pieces + 1) / 2",
        "again = 1",
        COST,
        AUTO,
        WORK,
    ),
    mutation(
        "curvature: several batches at once",
        "min(own if self.single else self.piece, chunk or own)",
        "min(own, chunk or own)",
        COST,
        AUTO,
        WORK,
    ),
    mutation(
        "curvature: a sum is sent once",
        "return 2 * (s.ranks - 1) / s.ranks * s.itemsize * numbers",
        "return (s.ranks - 1) / s.ranks * s.itemsize * numbers",
        COST,
    ),
    mutation(
        "curvature: float64 is as fast as float32",
        "wide = s.itemsize / 4",
        "wide = 1.0",
        COST,
        WORK,
    ),
    mutation(
        "curvature: a trial point costs a gradient less",
        "return total + 2 * forward(s) if whole is None",
        "return total + forward(s) if whole is None",
        COST,
        WORK,
    ),
    mutation(
        "curvature: ranks factor together what one does faster",
        "ranks > 1 and alone / ranks + sent < alone",
        "ranks > 1 and alone / ranks < alone",
        COST,
        SOLVE,
    ),
]
