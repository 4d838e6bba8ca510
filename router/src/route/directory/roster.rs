//! Who is watched: a slot for each engine, and the column that its blocks are stored under.
//!
//! An engine keeps its slot from its first watch until it is removed; a slot's generation tells its engines apart. A column
//! holds one watch of an engine: clearing or removing an engine retires the column at once, whatever it held, and it is used
//! again when no set names it any more.

use std::collections::HashMap;
use std::sync::Arc;

use contract::ids::EngineId;

use super::Slot;
use super::sets::{N_COLUMNS_MAX, ones};
use super::watch::Watch;

/// Generations of a slot before they begin anew.
const N_GENERATIONS: u16 = 0x7fff;

/// All slots and columns.
#[derive(Debug, Default)]
pub(super) struct Roster {
    by_engine: HashMap<EngineId, Slot>,
    seats: Vec<Seat>,
    columns: Vec<Column>,
    /// Bitset of the columns that are credited.
    live: Vec<u64>,
    n_retired: usize,
}

#[derive(Debug)]
struct Seat {
    generation: u16,
    column: Option<usize>,
    watch: Option<Arc<Watch>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Column {
    Free,
    Live(u16),
    Retired,
}

impl Roster {
    /// The slot and watch of `engine`, new ones when it has none.
    ///
    /// # Panics
    /// When there are 65,536 engines.
    pub(super) fn seat(&mut self, engine: &EngineId) -> (Slot, Arc<Watch>) {
        if let Some(slot) = self.slot(engine)
            && let Some(watch) = self.watch(slot)
        {
            return (slot, Arc::clone(watch));
        }
        let free = self.seats.iter().position(|seat| seat.watch.is_none());
        let index = free.unwrap_or_else(|| {
            self.seats.push(Seat { generation: 1, column: None, watch: None });
            self.seats.len() - 1
        });
        let seat = &mut self.seats[index];
        let index = u16::try_from(index).expect("a router has fewer than 65,536 engines");
        let slot = Slot { index, generation: seat.generation };
        let watch = Arc::new(Watch::new(engine.clone(), slot));
        seat.watch = Some(Arc::clone(&watch));
        self.by_engine.insert(engine.clone(), slot);
        (slot, watch)
    }

    /// The slot of an engine, none when it is not watched.
    pub(super) fn slot(&self, engine: &EngineId) -> Option<Slot> {
        self.by_engine.get(engine).copied()
    }

    /// The watch of a slot, none when its engine was removed.
    pub(super) fn watch(&self, slot: Slot) -> Option<&Arc<Watch>> {
        self.current(slot)?.watch.as_ref()
    }

    /// The column of a slot.
    pub(super) fn column(&self, slot: Slot) -> Option<usize> {
        self.current(slot)?.column
    }

    /// Whether the slot's engine was not removed.
    #[inline]
    pub(super) fn is_current(&self, slot: Slot) -> bool {
        self.current(slot).is_some_and(|seat| seat.watch.is_some())
    }

    /// Whose column it is.
    #[inline]
    pub(super) fn owner(&self, column: usize) -> Option<u16> {
        match self.columns[column] {
            Column::Live(slot) => Some(slot),
            Column::Free | Column::Retired => None,
        }
    }

    /// Gives a slot an empty column instead of the one it had, none when all are taken.
    pub(super) fn renew_column(&mut self, slot: Slot) -> Option<usize> {
        self.retire_column(slot);
        let free = self.columns.iter().position(|&column| column == Column::Free);
        let column = free.or_else(|| {
            let n_columns = self.columns.len();
            (n_columns < N_COLUMNS_MAX).then(|| {
                self.columns.push(Column::Free);
                self.live.resize(self.columns.len().div_ceil(64), 0);
                n_columns
            })
        })?;
        self.columns[column] = Column::Live(slot.index);
        self.live[column / 64] |= 1 << (column % 64);
        self.seats[usize::from(slot.index)].column = Some(column);
        Some(column)
    }

    /// Ends a slot's generation.
    pub(super) fn remove(&mut self, slot: Slot) {
        self.retire_column(slot);
        let seat = &mut self.seats[usize::from(slot.index)];
        if let Some(watch) = seat.watch.take() {
            self.by_engine.remove(watch.engine());
        }
        seat.generation = seat.generation % N_GENERATIONS + 1;
    }

    /// Bitset of the columns that are retired; empty when none is.
    pub(super) fn retired(&self) -> Vec<u64> {
        let mut retired = Vec::new();
        if self.n_retired == 0 {
            return retired;
        }
        for (column, _) in self.columns.iter().enumerate().filter(|(_, state)| **state == Column::Retired) {
            retired.resize(self.live.len(), 0);
            retired[column / 64] |= 1 << (column % 64);
        }
        retired
    }

    /// Lets columns that no set names any more be used again.
    pub(super) fn free(&mut self, swept: &[u64]) {
        for column in ones(swept) {
            debug_assert_eq!(self.columns[column], Column::Retired, "column {column} was swept");
            self.columns[column] = Column::Free;
            self.n_retired -= 1;
        }
    }

    /// Bitset of the columns that are credited.
    pub(super) fn live(&self) -> &[u64] {
        &self.live
    }

    /// The present generation of each slot.
    pub(super) fn generations(&self) -> impl ExactSizeIterator<Item = u16> {
        self.seats.iter().map(|seat| seat.generation)
    }

    /// Memory held.
    pub(super) fn bytes(&self) -> usize {
        let n_watches = self.seats.iter().filter(|seat| seat.watch.is_some()).count();
        self.by_engine.capacity() * (size_of::<(EngineId, Slot)>() + 1)
            + self.seats.capacity() * size_of::<Seat>()
            + self.columns.capacity() * size_of::<Column>()
            + self.live.capacity() * size_of::<u64>()
            + n_watches * (size_of::<Watch>() + 2 * size_of::<usize>())
    }

    #[inline]
    fn current(&self, slot: Slot) -> Option<&Seat> {
        self.seats.get(usize::from(slot.index)).filter(|seat| seat.generation == slot.generation)
    }

    fn retire_column(&mut self, slot: Slot) {
        if let Some(column) = self.seats[usize::from(slot.index)].column.take() {
            self.columns[column] = Column::Retired;
            self.n_retired += 1;
            self.live[column / 64] &= !(1 << (column % 64));
        }
    }
}
