//! Memory of packed matrices: few large mappings in huge pages, since one matrix alone is often smaller than a page.

use std::sync::Arc;

use crate::cpu::packed_file::Packing;
use crate::cpu::panels::Layout;
use crate::error::Result;
use crate::memory::Mapping;
use crate::weight::RawWeight;

/// Bytes of a mapping that matrices share; what is never packed into is never committed.
const CHUNK: usize = 64 << 20;
/// Alignment of a matrix.
pub(crate) const ALIGNMENT: usize = 4096;

/// Bytes of a mapping that nobody else has.
pub(crate) struct Region {
    mapping: Arc<Mapping>,
    offset: usize,
    len: usize,
}

impl Region {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: the bytes are this region's alone (see `Chunk`), and it is borrowed.
        unsafe { self.mapping.part(self.offset, self.len) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, mutably borrowed.
        unsafe { self.mapping.part_mut(self.offset, self.len) }
    }
}

/// A mapping that is given away front to back.
pub(crate) struct Chunk {
    mapping: Arc<Mapping>,
    used: usize,
}

impl Chunk {
    /// Takes over a mapping whole.
    pub(crate) fn new(mapping: Mapping) -> Self {
        Self { mapping: Arc::new(mapping), used: 0 }
    }

    /// The next `len` bytes, aligned; `None` when there are too few.
    pub(crate) fn take(&mut self, len: usize) -> Option<Region> {
        let offset = self.used.checked_next_multiple_of(ALIGNMENT)?;
        let end = offset.checked_add(len).filter(|&end| end <= self.mapping.len())?;
        self.used = end;
        Some(Region { mapping: Arc::clone(&self.mapping), offset, len })
    }

    /// Gives the memory of bytes not given away back to the system.
    pub(crate) fn discard_left(&mut self) {
        // SAFETY: regions end before `used`, and nobody else has the mapping.
        unsafe { self.mapping.discard_from(self.used) };
        self.used = self.mapping.len();
    }

    /// Bytes not given away.
    fn left(&self) -> usize {
        self.mapping.len() - self.used
    }
}

/// Where matrices are packed to, and what an earlier start has packed.
#[derive(Default)]
pub(crate) struct WeightMemory {
    arena: Arena,
    /// While a model is loaded whose packed copies are kept.
    pub(crate) packing: Option<Packing>,
}

impl WeightMemory {
    /// Zeroed bytes for a matrix.
    pub(crate) fn take(&mut self, len: usize) -> Result<Region> {
        self.arena.take(len)
    }

    /// The copy of a matrix that an earlier start has packed to `len` bytes.
    pub(crate) fn kept(&mut self, raw: &RawWeight<'_>, layout: Layout, len: usize) -> Option<Arc<Region>> {
        self.packing.as_mut()?.next(raw, layout, len)
    }

    /// Shares a packed matrix.
    pub(crate) fn share(&mut self, raw: &RawWeight<'_>, layout: Layout, region: Region) -> Arc<Region> {
        let region = Arc::new(region);
        if let Some(packing) = &mut self.packing {
            packing.packed(raw, layout, &region);
        }
        region
    }
}

/// Mappings that matrices share.
#[derive(Default)]
struct Arena {
    chunk: Option<Chunk>,
}

impl Arena {
    /// `len` zeroed bytes, aligned to a page.
    fn take(&mut self, len: usize) -> Result<Region> {
        if let Some(region) = self.chunk.as_mut().and_then(|chunk| chunk.take(len)) {
            return Ok(region);
        }
        let mut chunk = Chunk::new(Mapping::zeroed(len.max(CHUNK))?);
        let region = chunk.take(len).expect("it was made as long");
        // What is left of the longer one serves the next; a matrix larger than a chunk fills its own.
        if chunk.left() > self.chunk.as_ref().map_or(0, Chunk::left) {
            self.chunk = Some(chunk);
        }
        Ok(region)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_aligned_zeroed_and_apart() {
        let mut arena = Arena::default();
        let lens = [1, ALIGNMENT, 3 * ALIGNMENT + 5, 0, 2 * CHUNK, 17, CHUNK - 1, 9];
        let mut regions: Vec<Region> = lens.iter().map(|&len| arena.take(len).unwrap()).collect();
        for (value, (region, len)) in regions.iter_mut().zip(lens).enumerate() {
            assert_eq!((region.len(), region.as_slice().as_ptr().align_offset(ALIGNMENT)), (len, 0));
            assert!(region.as_slice().iter().all(|&byte| byte == 0));
            region.as_mut_slice().fill(value as u8 + 1);
        }
        for (value, region) in regions.iter().enumerate() {
            assert!(region.as_slice().iter().all(|&byte| byte == value as u8 + 1));
        }
        assert!(arena.take(usize::MAX).is_err());
    }

    #[test]
    fn small_matrices_share_a_mapping() {
        let mut arena = Arena::default();
        let regions: Vec<Region> = (0..10).map(|_| arena.take(1 << 20).unwrap()).collect();
        assert!(regions.iter().all(|region| Arc::ptr_eq(&region.mapping, &regions[0].mapping)));
    }
}
