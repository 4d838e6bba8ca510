//! The memory of a KV pool as transfers between workers see it: regions of blocks that system calls move bytes in and out of.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::memory::Mapping;
use crate::memory::runs::Runs;

/// One of a layer's two regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Region {
    /// Keys.
    Key = 0,
    /// Values.
    Value = 1,
}

impl Region {
    /// Both, in the order in which they travel.
    pub const BOTH: [Self; 2] = [Self::Key, Self::Value];
}

/// A handle to a pool's memory: for every layer a key and a value region, each `[n_blocks, block_bytes]` and contiguous.
///
/// Clones are the same memory and keep it alive. Bytes are moved by system calls and by copies through addresses, and
/// every range is checked against its region. No reference to them leaves this crate; the only one made is to the bytes
/// of a checksum while they are summed, since copying them first to sum the copy takes twice as long.
///
/// That a block is not written while it is read is not known here. Who moves bytes relies on the owner of the pool: a
/// block that is sent belongs to a sequence whose keys and values in it are complete, and stays with that sequence until
/// the transfer lets go of it; a block that is received into is reserved for this transfer alone until it has returned.
/// Where that were broken, bytes would be wrong, and their checksum with them.
#[derive(Clone)]
pub struct BlockMemory {
    pool: Arc<Pool>,
}

struct Pool {
    /// Addresses by layer and region.
    layers: Vec<[usize; 2]>,
    n_blocks: usize,
    block_bytes: [usize; 2],
    _owners: Vec<Box<dyn Any + Send + Sync>>,
}

impl BlockMemory {
    /// Allocates a pool, zeroed; memory is committed as it is touched.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn zeroed(n_layers: usize, n_blocks: usize, block_bytes: [usize; 2]) -> Result<Self> {
        let mut owners: Vec<Box<dyn Any + Send + Sync>> = Vec::with_capacity(2 * n_layers);
        let mut region = |bytes: usize| {
            let len = n_blocks.checked_mul(bytes).ok_or(Error::OutOfMemory { bytes: usize::MAX })?;
            let mapping = Mapping::zeroed(len)?;
            let address = mapping.address();
            owners.push(Box::new(mapping));
            Ok(address)
        };
        let mut layer = |_| Ok([region(block_bytes[0])?, region(block_bytes[1])?]);
        let layers = (0..n_layers).map(&mut layer).collect::<Result<_>>()?;
        // SAFETY: each region is a mapping of `n_blocks` times its block's bytes that `owners` keeps.
        Ok(unsafe { Self::new(layers, n_blocks, block_bytes, owners) })
    }

    /// Makes a handle to memory that `owners` keep alive.
    ///
    /// # Safety
    /// Each region has `n_blocks` times its `block_bytes` at its address, mapped for reading and writing with exposed
    /// provenance for as long as `owners` live; whoever makes references to parts of it keeps them disjoint in time from
    /// what is sent and received, as the type says.
    pub(crate) unsafe fn new(
        layers: Vec<[usize; 2]>,
        n_blocks: usize,
        block_bytes: [usize; 2],
        owners: Vec<Box<dyn Any + Send + Sync>>,
    ) -> Self {
        Self { pool: Arc::new(Pool { layers, n_blocks, block_bytes, _owners: owners }) }
    }

    /// Layers.
    #[must_use]
    pub fn n_layers(&self) -> usize {
        self.pool.layers.len()
    }

    /// Blocks in each region.
    #[must_use]
    pub fn n_blocks(&self) -> usize {
        self.pool.n_blocks
    }

    /// Bytes of one block in a region.
    #[must_use]
    pub fn block_bytes(&self, region: Region) -> usize {
        self.pool.block_bytes[region as usize]
    }

    /// Addresses of each layer's two regions in this process, for a peer that is permitted to read its memory.
    pub fn addresses(&self) -> impl Iterator<Item = [u64; 2]> + '_ {
        self.pool.layers.iter().map(|regions| regions.map(|address| address as u64))
    }

    /// An empty list of runs in this memory.
    #[must_use]
    pub fn runs(&self) -> Runs {
        Runs::new(self.clone())
    }

    /// Copies bytes of a region, from `offset` on, into `target`.
    ///
    /// # Errors
    /// [`Error::Index`] when the layer does not exist or the region is shorter.
    pub fn read(&self, layer: usize, region: Region, offset: usize, target: &mut [u8]) -> Result<()> {
        let address = self.locate(layer, region, offset, target.len())?;
        let source = std::ptr::with_exposed_provenance::<u8>(address);
        // SAFETY: `locate` checked the range, which is mapped while the pool lives; the target is another allocation,
        // since no reference into a pool's memory leaves this crate.
        unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len()) };
        Ok(())
    }

    /// Copies `source` into a region, from `offset` on.
    ///
    /// # Errors
    /// [`Error::Index`] when the layer does not exist or the region is shorter.
    pub fn write(&self, layer: usize, region: Region, offset: usize, source: &[u8]) -> Result<()> {
        let address = self.locate(layer, region, offset, source.len())?;
        let target = std::ptr::with_exposed_provenance_mut::<u8>(address);
        // SAFETY: as in `read`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target, source.len()) };
        Ok(())
    }

    /// Address of `len` bytes of a region.
    pub(crate) fn locate(&self, layer: usize, region: Region, offset: usize, len: usize) -> Result<usize> {
        let out_of = |what, value: usize, bound: usize| Error::Index {
            op: "block memory",
            what,
            value: value as u64,
            bound: bound as u64,
        };
        let Some(regions) = self.pool.layers.get(layer) else {
            return Err(out_of("layer", layer, self.pool.layers.len()));
        };
        let region_bytes = self.pool.n_blocks * self.pool.block_bytes[region as usize];
        match offset.checked_add(len) {
            Some(end) if end <= region_bytes => Ok(regions[region as usize] + offset),
            end => Err(out_of("end of a run", end.unwrap_or(usize::MAX), region_bytes + 1)),
        }
    }
}

impl fmt::Debug for BlockMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Pool { layers, n_blocks, block_bytes, .. } = &*self.pool;
        write!(f, "BlockMemory({} layers of {n_blocks} blocks of {block_bytes:?} bytes)", layers.len())
    }
}

#[cfg(test)]
mod tests {
    use crate::{CpuOps, CpuOptions, DType, LayerCache, Ops as _, Shape, StreamId};

    use super::*;

    #[test]
    fn a_devices_own_cache_is_reached_and_another_devices_is_refused() {
        let [ours, other] = [0, 1].map(|_| CpuOps::new(&CpuOptions::default()).unwrap());
        let region = |ops: &CpuOps, n_blocks| ops.alloc(Shape::from([n_blocks, 2, 4, 8]), DType::Bf16).unwrap();
        let layer = |ops: &CpuOps| LayerCache { keys: region(ops, 5), values: region(ops, 5) };
        let cache = [layer(&ours), layer(&ours)];
        let memory = ours.block_memory(&cache).unwrap();
        assert_eq!((memory.n_layers(), memory.n_blocks(), memory.block_bytes(Region::Value)), (2, 5, 128));
        memory.write(1, Region::Value, 128, &[7; 128]).unwrap();
        let mut elements = vec![0; 5 * 128];
        ours.read_back(StreamId::MAIN, &cache[1].values, &mut elements).unwrap();
        assert!(elements[128..256].iter().all(|&byte| byte == 7) && elements[256] == 0);
        assert!(matches!(other.block_memory(&cache), Err(Error::Device { .. })));
        drop((cache, ours));
        memory.read(1, Region::Value, 128, &mut elements[..128]).unwrap();
        let uneven = LayerCache { keys: region(&other, 5), values: region(&other, 4) };
        assert!(matches!(other.block_memory(&[layer(&other), uneven]), Err(Error::Shape { .. })));
    }

    #[test]
    fn ranges_beyond_a_region_and_layers_that_are_not_there_are_refused() {
        let memory = BlockMemory::zeroed(2, 3, [8, 4]).unwrap();
        memory.write(1, Region::Value, 8, &[1, 2, 3, 4]).unwrap();
        let mut read = [0; 5];
        memory.read(1, Region::Value, 7, &mut read).unwrap();
        assert_eq!(read, [0, 1, 2, 3, 4]);
        let refused = [
            memory.write(2, Region::Key, 0, &[0]),
            memory.write(0, Region::Value, 9, &[0; 4]),
            memory.read(0, Region::Key, 24, &mut [0]),
            memory.read(0, Region::Key, usize::MAX, &mut [0]),
        ];
        assert!(refused.iter().all(|result| matches!(result, Err(Error::Index { .. }))), "{refused:?}");
        memory.read(0, Region::Key, 24, &mut []).unwrap();
    }
}
