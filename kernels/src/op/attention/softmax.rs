//! The state of an online softmax over some positions, and how two states become one.

/// The largest score before there is any: finite, so that it can be subtracted from itself.
pub(crate) const LOWEST: f32 = -1e30;

/// For each row: the largest score (in powers of two), the sum of weights, the weighted sum of values.
pub(crate) struct Softmax<'a> {
    /// `[rows]`
    pub(crate) largest: &'a mut [f32],
    /// `[rows]`
    pub(crate) sum: &'a mut [f32],
    /// `[rows, stride]`
    pub(crate) acc: &'a mut [f32],
    stride: usize,
}

impl<'a> Softmax<'a> {
    /// Numbers that the state of `n_rows` rows takes, in whole cache lines.
    pub(crate) fn len(n_rows: usize, stride: usize) -> usize {
        (n_rows * (stride + 2)).next_multiple_of(16)
    }

    /// Takes `len` of `memory`, with whatever is in it.
    pub(crate) fn new(memory: &'a mut [f32], n_rows: usize, stride: usize) -> Self {
        let (acc, rest) = memory.split_at_mut(n_rows * stride);
        let (largest, rest) = rest.split_at_mut(n_rows);
        Self { largest, sum: &mut rest[..n_rows], acc, stride }
    }

    /// Numbers from one row of `acc` to the next.
    #[inline(always)]
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// No positions yet.
    #[inline(always)]
    pub(crate) fn clear(&mut self) {
        self.largest.fill(LOWEST);
        self.sum.fill(0.0);
        self.acc.fill(0.0);
    }

    /// Adds positions that come after all of its own.
    #[inline(always)]
    pub(crate) fn merge(&mut self, later: &Softmax<'_>) {
        let rows = self.acc.chunks_exact_mut(self.stride).zip(later.acc.chunks_exact(self.stride));
        for (row, (acc, later_acc)) in rows.enumerate() {
            // A row that saw nothing would only add zeros.
            if later.largest[row] == LOWEST {
                continue;
            }
            let largest = self.largest[row].max(later.largest[row]);
            let (a, b) = ((self.largest[row] - largest).exp2(), (later.largest[row] - largest).exp2());
            self.largest[row] = largest;
            self.sum[row] = self.sum[row] * a + later.sum[row] * b;
            for (acc, later) in acc.iter_mut().zip(later_acc) {
                *acc = *acc * a + later * b;
            }
        }
    }

    /// The weighted mean of the values.
    pub(crate) fn result(&self, row: usize, target: &mut [f32]) {
        let factor = 1.0 / self.sum[row];
        // Plus 0, so that a zero has no sign that depends on how many zeros were added.
        target.iter_mut().zip(&self.acc[row * self.stride..]).for_each(|(out, acc)| *out = acc * factor + 0.0);
    }
}
