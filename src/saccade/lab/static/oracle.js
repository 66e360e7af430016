// attention in float64, written out: what the kernels' outputs are compared with. the one thing this page computes itself

// job: queries, keys, heads, kv, head_dim, scale, allowed(t, j); q [T, Hq, D], k, v [Tk, Hk, D], do like q
// gives o [T, Hq, D], lse [T, Hq] and, with do, dq, dk, dv
export function attention(job, q, k, v, grad) {
  const { queries, keys, heads, kv, head_dim: D, scale, allowed } = job;
  const group = heads / kv;
  const out = { o: new Float64Array(queries * heads * D), lse: new Float64Array(queries * heads) };
  if (grad) Object.assign(out, { dq: new Float64Array(q.length), dk: new Float64Array(k.length), dv: new Float64Array(v.length) });
  const p = new Float64Array(keys);
  const dp = new Float64Array(keys);
  for (let h = 0; h < heads; h++) {
    const g = Math.floor(h / group);
    for (let t = 0; t < queries; t++) {
      const row = (t * heads + h) * D;
      let most = -Infinity;
      for (let j = 0; j < keys; j++) {
        p[j] = -Infinity;
        if (!allowed(t, j)) continue;
        p[j] = scale * dot(q, row, k, (j * kv + g) * D, D);
        most = Math.max(most, p[j]);
      }
      out.lse[t * heads + h] = -Infinity;
      if (most === -Infinity) continue;
      let total = 0;
      for (let j = 0; j < keys; j++) total += p[j] = Math.exp(p[j] - most);
      out.lse[t * heads + h] = most + Math.log(total);
      for (let j = 0; j < keys; j++) {
        p[j] /= total;
        if (p[j]) add(out.o, row, v, (j * kv + g) * D, p[j], D);
      }
      if (grad) differentiate(out, { q, k, v, grad }, { row, g, p, dp, keys, kv, D, scale });
    }
  }
  return out;
}

// of one row: dV += p do, dS = p (do·v − do·o), dQ += scale dS K, dK += scale dS q
function differentiate(out, { q, k, v, grad }, { row, g, p, dp, keys, kv, D, scale }) {
  const delta = dot(grad, row, out.o, row, D);
  for (let j = 0; j < keys; j++) {
    if (!p[j]) continue;
    const at = (j * kv + g) * D;
    add(out.dv, at, grad, row, p[j], D);
    dp[j] = scale * p[j] * (dot(grad, row, v, at, D) - delta);
    add(out.dq, row, k, at, dp[j], D);
    add(out.dk, at, q, row, dp[j], D);
  }
}

function dot(a, from, b, at, D) {
  let sum = 0;
  for (let d = 0; d < D; d++) sum += a[from + d] * b[at + d];
  return sum;
}

function add(to, at, x, from, factor, D) {
  for (let d = 0; d < D; d++) to[at + d] += factor * x[from + d];
}

// the largest difference that is furthest outside, or nearest to, what is allowed; tolerance a number or one an element
export function compare(got, exact, tolerance) {
  let worst = { error: 0, allowed: typeof tolerance === 'number' ? tolerance : tolerance[0], over: -Infinity };
  for (let n = 0; n < exact.length; n++) {
    const allowed = typeof tolerance === 'number' ? tolerance : tolerance[n];
    // an infinity is right when it is the same one, and NaN never is
    const error = got[n] === exact[n] ? 0 : Math.abs(got[n] - exact[n]);
    const over = Number.isNaN(error) ? Infinity : error - allowed;
    if (over > worst.over) worst = { error, allowed, over };
  }
  return { error: worst.error, allowed: worst.allowed, ok: worst.over <= 0 };
}
