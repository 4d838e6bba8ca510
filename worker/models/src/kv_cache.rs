//! The paged cache of keys and values: one region of each for every layer, over all blocks.

use std::fmt;
use std::sync::Arc;

use contract::kv::{BlockOrder, KvDtype, KvLayout};
use kernels::{DType, Error, LayerCache, Ops, Shape};

/// What a model keeps of each token, in each layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvSpec {
    /// Layers.
    pub n_layers: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Elements of a key per head.
    pub key_dim: u32,
    /// Elements of a value per head.
    pub value_dim: u32,
}

impl KvSpec {
    /// The layout of a pool for this model.
    pub fn layout(&self, order: BlockOrder, block_size: u32, dtype: KvDtype) -> KvLayout {
        let Self { n_layers, kv_heads, key_dim, value_dim } = *self;
        KvLayout { order, n_layers, kv_heads, block_size, key_dim, value_dim, dtype }
    }
}

/// A pool's memory on a device.
#[derive(Clone, Debug)]
pub struct KvCache {
    layout: KvLayout,
    n_blocks: usize,
    layers: Vec<LayerCache>,
    observer: Option<Observer>,
}

/// Is told of each layer whose keys and values a step has written.
#[derive(Clone)]
struct Observer(Arc<dyn Fn(usize) + Send + Sync>);

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Observer")
    }
}

impl KvCache {
    /// Allocates all regions; devices commit memory when it is touched.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn allocate(ops: &dyn Ops, layout: KvLayout, n_blocks: usize) -> Result<Self, Error> {
        let dtype = match layout.dtype {
            KvDtype::F32 => DType::F32,
            KvDtype::Bf16 => DType::Bf16,
            KvDtype::F16 => DType::F16,
            KvDtype::Int8 => DType::I8,
        };
        let (heads, block) = (layout.kv_heads as usize, layout.block_size as usize);
        let region = |dim: u32| {
            // Int8 rows are longer by their scale.
            let dim = layout.dtype.row_bytes(dim as usize) / dtype.bytes();
            let dims = match layout.order {
                BlockOrder::HeadsFirst => [n_blocks, heads, block, dim],
                BlockOrder::TokensFirst => [n_blocks, block, heads, dim],
            };
            let shape = Shape::new(&dims).ok_or(Error::OutOfMemory { bytes: usize::MAX })?;
            ops.alloc(shape, dtype)
        };
        let layer = |_| Ok(LayerCache { keys: region(layout.key_dim)?, values: region(layout.value_dim)? });
        let layers = (0..layout.n_layers).map(layer).collect::<Result<_, Error>>()?;
        Ok(Self { layout, n_blocks, layers, observer: None })
    }

    /// How blocks lie in the regions.
    pub fn layout(&self) -> KvLayout {
        self.layout
    }

    /// Blocks in the pool.
    pub fn n_blocks(&self) -> usize {
        self.n_blocks
    }

    /// Calls `observer` with the index of each layer as soon as a step has written its keys and values.
    pub fn observe(&mut self, observer: impl Fn(usize) + Send + Sync + 'static) {
        self.observer = Some(Observer(Arc::new(observer)));
    }

    /// A step has written a layer's keys and values.
    pub(crate) fn written(&self, layer: usize) {
        if let Some(Observer(observer)) = &self.observer {
            observer(layer);
        }
    }

    /// A layer's two regions.
    pub fn layer(&self, index: usize) -> &LayerCache {
        &self.layers[index]
    }
}

#[cfg(test)]
mod tests {
    use contract::kv::KvPart;
    use kernels::DryRun;

    use super::*;

    #[test]
    fn regions_take_what_the_layout_says() {
        let spec = KvSpec { n_layers: 2, kv_heads: 3, key_dim: 64, value_dim: 48 };
        for dtype in [KvDtype::F32, KvDtype::Bf16, KvDtype::F16, KvDtype::Int8] {
            for order in [BlockOrder::HeadsFirst, BlockOrder::TokensFirst] {
                let layout = spec.layout(order, 16, dtype);
                let cache = KvCache::allocate(&DryRun, layout, 7).unwrap();
                for layer in [cache.layer(0), cache.layer(1)] {
                    assert_eq!(layer.keys.n_bytes(), 7 * layout.block_bytes(KvPart::Key), "{dtype:?}");
                    assert_eq!(layer.values.n_bytes(), 7 * layout.block_bytes(KvPart::Value), "{dtype:?}");
                }
            }
        }
    }
}
