// The steps of a policy, as ListSteps has them: read whole once, then only what is new. Arrays stay
// bounded: once twice MOST points are there, the service is asked to bin them anew.

import { steps } from "./api.js";

export const MOST = 1000;
const MOST_MARKS = 2000;

/**
 * read(signal, policy) resolves to whether anything changed. Afterwards `seq`, `version`, `finishedAt`
 * and `figures` (name -> {mean, low, high}; low and high null where no point stands for several steps)
 * are columns, oldest first; `marks` has the newest MOST_MARKS; `numSteps` counts the steps that they
 * stand for.
 * `figures()` names what to read: [] for all.
 */
export function stepSeries(policyId, figures, { most = MOST, last = null } = {}) {
  const all = { seq: [], version: [], finishedAt: [], figures: new Map(), marks: [], numSteps: 0 };
  let isWhole = false;
  let epoch = null;
  let seen = null; // the policy at the last read

  async function whole(signal) {
    // Which seqs the last steps have is told by the whole run, binned.
    let after = 0;
    if (last !== null) {
      const run = await steps(policyId, { max_points: most, figures: figures().slice(0, 1) }, signal);
      const skipped = 1 - last / Math.max(run.num_steps, 1);
      if (skipped > 0) after = run.seq[Math.floor(skipped * run.seq.length)] - 1;
    }
    const answer = await steps(policyId, { max_points: most, figures: figures(), after_seq: after }, signal);
    all.seq = answer.seq;
    all.version = answer.version;
    all.finishedAt = answer.finished_at;
    all.marks = answer.marks.slice(-MOST_MARKS);
    all.numSteps = answer.num_steps;
    all.figures = new Map(
      answer.series.map((one) => [
        one.figure,
        { mean: one.mean, low: one.low.length ? one.low : null, high: one.high.length ? one.high : null },
      ]),
    );
    isWhole = true;
  }

  function append(answer) {
    all.seq.push(...answer.seq);
    all.version.push(...answer.version);
    all.finishedAt.push(...answer.finished_at);
    all.marks = [...all.marks, ...answer.marks].slice(-MOST_MARKS);
    all.numSteps += answer.num_steps;
    const told = new Map(answer.series.map((one) => [one.figure, one]));
    const absent = Array(answer.seq.length).fill(null);
    for (const [name, kept] of all.figures) {
      const one = told.get(name) ?? { mean: absent, low: [], high: [] };
      kept.mean.push(...one.mean);
      kept.low?.push(...(one.low.length ? one.low : one.mean));
      kept.high?.push(...(one.high.length ? one.high : one.mean));
    }
  }

  return {
    all,
    // `policy`: as the service has it now. Another one of the same name begins anew; one that is what
    // it was, and has nothing accepted that may become a step, has no new steps.
    async read(signal, policy) {
      const now = JSON.stringify(policy);
      const after = all.seq.at(-1) ?? 0;
      if (!isWhole || policy.created_at !== epoch || all.seq.length > 2 * most) {
        await whole(signal);
        epoch = policy.created_at;
        seen = now;
        return true;
      }
      if (now === seen && after + 1 >= policy.next_seq) return false;
      const answer = await steps(policyId, { after_seq: after, max_points: most, figures: figures() }, signal);
      seen = now;
      if (!answer.seq.length && !answer.marks.length) return false;
      const known = new Set(all.marks.map((mark) => mark.seq));
      answer.marks = answer.marks.filter((mark) => !known.has(mark.seq));
      append(answer);
      return answer.seq.length > 0 || answer.marks.length > 0;
    },
    reset() {
      isWhole = false;
    },
  };
}

// What one figure looks like for a chart. `color` is a name of a CSS variable.
export function curve(all, figure, name, color) {
  const kept = all.figures.get(figure) ?? { mean: [], low: null, high: null };
  return { name, color, x: kept.mean.length ? all.seq : [], mean: kept.mean, low: kept.low, high: kept.high };
}

// A chart draws again what it was handed; arrays that grew in place are new to it all the same.
export function hasValues(all, figure) {
  return all.figures.get(figure)?.mean.some((value) => value !== null) ?? false;
}
