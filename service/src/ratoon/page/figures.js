// Which figures of a step are shown where, and in what words.

export const LABELS = {
  reward_mean: "reward",
  response_length_mean: "response length",
  sampler_kl: "sampler KL",
  kl: "reference KL",
  step_kl: "KL of the step",
  old_kl: "KL to the old log-probs",
  grad_norm: "gradient norm",
  entropy: "entropy",
  ratio_max: "largest ratio",
  token_reduction: "prefix reduction",
  tokens_per_second: "tokens per second",
  zero_variance_fraction: "groups without variance",
  truncated_fraction: "truncated",
  staleness_mean: "staleness",
};

// Beside each other for several policies, and first for one.
export const COMPARED = ["reward_mean", "loss", "sampler_kl", "grad_norm", "entropy", "response_length_mean"];

export const GROUPS = [
  ["Learning", ["loss", "entropy", "response_length_mean", "kl", "advantage_std", "reward_std"]],
  ["Stability", ["grad_norm", "sampler_kl", "sampler_gap_max", "step_kl", "ratio_max", "clip_fraction_high", "clip_fraction_low", "old_kl"]],
  ["Data", ["zero_variance_fraction", "truncated_fraction", "staleness_mean", "token_reduction", "num_sequences", "trained_tokens"]],
  ["Speed", ["tokens_per_second", "hardware_mfu", "peak_memory_bytes"]],
];

export function labelOf(figure) {
  return LABELS[figure] ?? figure.replaceAll("_", " ").replaceAll(".", ", ");
}

// What a mark of a step says.
export function told(mark) {
  const kinds = mark.warnings.map((kind) => kind.replaceAll("_", " "));
  if (mark.skip_reason) kinds.unshift(`skipped: ${mark.skip_reason.replaceAll("_", " ")}`);
  if (!kinds.length && mark.kind) kinds.push(mark.kind.replaceAll("_", " "));
  return kinds.join(", ");
}

export const stepLink = (id, seq) => `#/policies/${encodeURIComponent(id)}/steps/${seq}`;
export const policyLink = (id) => `#/policies/${encodeURIComponent(id)}`;

export function rolloutLink(id, seq, group, index, token) {
  const at = token === null || token === undefined ? "" : `?token=${token}`;
  return `${stepLink(id, seq)}/rollouts/${group}/${index}${at}`;
}
