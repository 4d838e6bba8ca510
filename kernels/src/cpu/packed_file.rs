//! Packed matrices of one model in a file, so that a second start reads what the first has computed.
//!
//! | bytes | what |
//! |---|---|
//! | 8, 4, 4, 8, 32 | `TESSPACK`, version, matrices (u32), bytes of data (u64), key |
//! | 48 for each matrix | digest of what it was packed from (32), offset in the data (u64), bytes (u64) |
//! | 32 for each 2 MB of data | their digest |
//! | 32 | digest of all of the above |
//! | data, from the next multiple of 4096 | matrices in the order they were loaded in, each at a multiple of 4096 |
//!
//! Numbers are little endian; the data is in the machine's order, which is part of the key. Digests are BLAKE3. They
//! guard against damage, not against somebody who may write to the folder and could replace the model as well.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::cpu::CpuOps;
use crate::cpu::access::Shared;
use crate::cpu::panels::{ComputeDtype, Layout};
use crate::cpu::pool::Pool;
use crate::cpu::weight_memory::{ALIGNMENT, Chunk, Region};
use crate::memory::Mapping;
use crate::weight::RawWeight;

/// To be raised whenever the same weights are packed to other bytes.
const VERSION: u32 = 1;
const MAGIC: [u8; 8] = *b"TESSPACK";
const PRELUDE: usize = 56;
const ENTRY: usize = 48;
const DIGEST: usize = 32;
/// Bytes that one thread reads and checks at a time: a huge page.
const PIECE: usize = 2 << 20;
/// Bytes after which a write waits for the disk.
const SYNC: usize = 256 << 20;
/// Most matrices of a file.
const MATRICES_MAX: usize = 1 << 20;
/// Bytes of a matrix that its digest reads at its start, middle and end.
const SAMPLE: usize = 4096;

const NO_FILE: PackedFileError = PackedFileError::Damaged("it is no file of packed weights");

type Digest = [u8; DIGEST];

/// Name and key of the file that keeps a model's packed matrices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedFile {
    path: PathBuf,
    key: Digest,
}

/// Why a file of packed matrices is not used.
#[derive(Debug, thiserror::Error)]
pub enum PackedFileError {
    /// It cannot be read; [`NotFound`](io::ErrorKind::NotFound) when there is none yet.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// It is not what was written.
    #[error("{0}")]
    Damaged(&'static str),
    /// There is no memory to read it into.
    #[error("{0}")]
    Memory(#[from] crate::Error),
}

/// Matrices that were packed and are not in the file yet.
pub struct PackedCopies {
    copies: Vec<Copied>,
}

/// A matrix in the order of loading.
struct Copied {
    digest: Digest,
    region: Arc<Region>,
}

/// Loading a model whose packed matrices are kept.
#[derive(Default)]
pub(crate) struct Packing {
    /// What was read; ends at the first matrix that is not the one loaded.
    stored: Option<Stored>,
    /// All matrices so far.
    copies: Vec<Copied>,
    /// How many of them were not in the file.
    n_packed: usize,
}

/// A file's matrices, in memory.
struct Stored {
    chunk: Chunk,
    entries: std::vec::IntoIter<(Digest, usize)>,
}

impl PackedFile {
    /// Ending of the names of such files.
    pub const EXTENSION: &str = "packed";
    /// Beginning of the names of files that are being written, or were when their process was killed.
    pub const TEMPORARY: &str = ".packing-";

    /// Names the file in `folder` for weights computed as `dtype` of the model that `identity` stands for.
    ///
    /// One file serves all instruction sets, which share a layout.
    pub fn in_folder(folder: &Path, identity: &[u8], dtype: ComputeDtype) -> Self {
        let mut hasher = blake3::Hasher::new();
        let order: &[u8] = if cfg!(target_endian = "little") { b"little" } else { b"big" };
        hasher.update(&VERSION.to_le_bytes()).update(format!("{dtype:?} ").as_bytes()).update(order).update(identity);
        let hash = hasher.finalize();
        Self { path: folder.join(format!("{}.{}", &hash.to_hex()[..32], Self::EXTENSION)), key: hash.into() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl CpuOps {
    /// Begins to load a model whose packed matrices `file` keeps: `load_weight` takes them from there as long as they
    /// are the ones it is asked for, in the same order.
    ///
    /// # Errors
    /// Why the file is not used; loading packs everything then, and [`CpuOps::finish_packing`] returns it all the same.
    pub fn begin_packing(&self, file: &PackedFile) -> Result<(), PackedFileError> {
        let (mut machine, _) = self.enter("begin_packing");
        machine.weights.packing = Some(Packing::default());
        let stored = read(&mut machine.pool, file)?;
        machine.weights.packing = Some(Packing { stored: Some(stored), ..Packing::default() });
        Ok(())
    }

    /// Ends it; returns the model's matrices unless all were in the file and nothing else was.
    pub fn finish_packing(&self) -> Option<PackedCopies> {
        let (mut machine, _) = self.enter("finish_packing");
        let packing = machine.weights.packing.take()?;
        let is_whole = packing.stored.is_some_and(|stored| stored.entries.len() == 0) && packing.n_packed == 0;
        (!is_whole).then_some(PackedCopies { copies: packing.copies })
    }
}

impl Packing {
    /// The next matrix of the file, if it is the one to be loaded.
    pub(crate) fn next(&mut self, raw: &RawWeight<'_>, layout: Layout, len: usize) -> Option<Arc<Region>> {
        let stored = self.stored.as_mut()?;
        let digest = digest(raw, layout);
        let is_next = stored.entries.next().is_some_and(|entry| entry == (digest, len));
        // The file's matrices follow each other as `take` gives them; after one that is not asked for all are in doubt.
        let Some(region) = is_next.then(|| stored.chunk.take(len)).flatten() else {
            self.stored = None;
            return None;
        };
        let region = Arc::new(region);
        self.copies.push(Copied { digest, region: Arc::clone(&region) });
        Some(region)
    }

    /// Notes a matrix that was packed.
    pub(crate) fn packed(&mut self, raw: &RawWeight<'_>, layout: Layout, region: &Arc<Region>) {
        self.copies.push(Copied { digest: digest(raw, layout), region: Arc::clone(region) });
        self.n_packed += 1;
    }
}

impl Drop for Stored {
    /// The regions that were taken keep the mapping; what nobody asked for need not stay in memory.
    fn drop(&mut self) {
        self.chunk.discard_left();
    }
}

/// Stands for a raw matrix: format, shape, layout and samples of its bytes, which tell the matrices of a model apart.
fn digest(raw: &RawWeight<'_>, layout: Layout) -> Digest {
    let mut hasher = blake3::Hasher::new();
    hasher.update(format!("{:?} {:?} {layout:?} {} ", raw.format, raw.shape.dims(), raw.bytes.len()).as_bytes());
    let sample = SAMPLE.min(raw.bytes.len());
    let last = raw.bytes.len() - sample;
    for start in [0, last / 2, last] {
        hasher.update(&raw.bytes[start..start + sample]);
    }
    hasher.finalize().into()
}

fn read(pool: &mut Pool, wanted: &PackedFile) -> Result<Stored, PackedFileError> {
    // Whoever opens a pipe waits for one that writes to it.
    if !std::fs::metadata(&wanted.path)?.is_file() {
        return Err(NO_FILE);
    }
    let file = File::open(&wanted.path)?;
    let header = Header::read(&file, &wanted.key)?;
    let mut mapping = Mapping::zeroed(header.data_len)?;
    let data = Shared::new(mapping.as_mut_slice());
    let failure = Mutex::new(None);
    pool.run(header.pieces.len(), &|_, piece| {
        let start = piece * PIECE;
        // SAFETY: each piece is one chunk and has its own bytes.
        let bytes = unsafe { data.part(start, PIECE.min(header.data_len - start)) };
        let checked = match file.read_exact_at(bytes, (header.data_start + start) as u64) {
            Ok(()) if blake3::hash(bytes) == header.pieces[piece] => return,
            Ok(()) => PackedFileError::Damaged("its data is damaged"),
            Err(error) => error.into(),
        };
        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(checked);
    });
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(Stored { chunk: Chunk::new(mapping), entries: header.entries.into_iter() }),
    }
}

/// What stands before the data.
struct Header {
    entries: Vec<(Digest, usize)>,
    pieces: Vec<Digest>,
    data_start: usize,
    data_len: usize,
}

impl Header {
    /// Reads and checks it; nothing in it is believed before.
    fn read(file: &File, key: &Digest) -> Result<Self, PackedFileError> {
        let damaged = PackedFileError::Damaged;
        let about = file.metadata()?;
        if !about.is_file() || about.len() < PRELUDE as u64 {
            return Err(NO_FILE);
        }
        let mut prelude = [0; PRELUDE];
        file.read_exact_at(&mut prelude, 0)?;
        if prelude[..8] != MAGIC || number(&prelude[8..12]) != VERSION as usize || prelude[24..] != *key {
            return Err(damaged("it is not of this model and version"));
        }
        let (n_entries, data_len) = (number(&prelude[12..16]), number(&prelude[16..24]));
        let len = header_len(n_entries, data_len);
        let data_start = len.next_multiple_of(ALIGNMENT);
        if n_entries > MATRICES_MAX || data_start.checked_add(data_len).map(|len| len as u64) != Some(about.len()) {
            return Err(damaged("it has another length than it says"));
        }
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, 0)?;
        let (bytes, checksum) = bytes.split_at(len - DIGEST);
        if *blake3::hash(bytes).as_bytes() != checksum {
            return Err(damaged("its table is damaged"));
        }
        let (entries, pieces) = bytes[PRELUDE..].split_at(n_entries * ENTRY);
        let mut end = 0usize;
        let mut parse = |entry: &[u8; ENTRY]| {
            let (digest, [offset, len]) = entry
                .split_first_chunk::<DIGEST>()
                .map(|(digest, rest)| (*digest, [number(&rest[..8]), number(&rest[8..])]))?;
            let follows = offset == end.next_multiple_of(ALIGNMENT) && len <= data_len - offset.min(data_len);
            end = offset.saturating_add(len);
            follows.then_some((digest, len))
        };
        let entries: Option<Vec<_>> = entries.as_chunks::<ENTRY>().0.iter().map(&mut parse).collect();
        let entries = entries.filter(|_| end == data_len).ok_or(damaged("its table makes no sense"))?;
        Ok(Self { entries, pieces: pieces.as_chunks::<DIGEST>().0.to_vec(), data_start, data_len })
    }
}

/// A little-endian number; what is too large for this machine is larger than any file.
fn number(bytes: &[u8]) -> usize {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    usize::try_from(u64::from_le_bytes(wide)).unwrap_or(usize::MAX)
}

fn header_len(n_entries: usize, data_len: usize) -> usize {
    let pieces = data_len.div_ceil(PIECE).saturating_mul(DIGEST);
    n_entries.saturating_mul(ENTRY).saturating_add(pieces).saturating_add(PRELUDE + DIGEST).min(usize::MAX / 2)
}

impl PackedCopies {
    /// Bytes of the matrices.
    pub fn n_bytes(&self) -> usize {
        self.copies.iter().map(|copy| copy.region.len()).sum()
    }

    /// Writes them: to a temporary file beside `file`, which takes its place when all of it is on the disk.
    ///
    /// Whoever opens `file` meanwhile has the old one or none; of two that write, the later wins. When `stop` is set
    /// it gives up before the next piece.
    ///
    /// # Errors
    /// What the operating system says; nothing is left behind.
    pub fn write(&self, file: &PackedFile, stop: &AtomicBool) -> io::Result<()> {
        let folder = file.path.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder)?;
        let temporary = tempfile::Builder::new().prefix(PackedFile::TEMPORARY).tempfile_in(folder)?;
        let mut table = Vec::new();
        let mut end = 0usize;
        for copy in &self.copies {
            let offset = end.next_multiple_of(ALIGNMENT);
            end = offset + copy.region.len();
            table.extend_from_slice(&copy.digest);
            table.extend([offset, copy.region.len()].map(|n| (n as u64).to_le_bytes()).as_flattened());
        }
        let len = header_len(self.copies.len(), end);
        let mut output = temporary.as_file();
        output.seek(SeekFrom::Start(len.next_multiple_of(ALIGNMENT) as u64))?;
        let pieces = self.write_data(output, stop)?;
        let n_copies = u32::try_from(self.copies.len()).map_err(io::Error::other)?;
        let mut header = [&MAGIC[..], &VERSION.to_le_bytes(), &n_copies.to_le_bytes()].concat();
        header.extend([&(end as u64).to_le_bytes()[..], &file.key, &table, pieces.as_flattened()].concat());
        header.extend(blake3::hash(&header).as_bytes());
        assert_eq!(header.len(), len, "as long as was left free");
        output.write_all_at(&header, 0)?;
        output.sync_all()?;
        temporary.persist(&file.path)?;
        // The name is on the disk when the folder is; without it the file is merely written again.
        File::open(folder)?.sync_all()
    }

    /// Writes the data and returns the digests of its pieces; most of it is on the disk then.
    fn write_data(&self, mut output: &File, stop: &AtomicBool) -> io::Result<Vec<Digest>> {
        let (mut pieces, mut piece) = (Vec::new(), Vec::with_capacity(PIECE));
        let mut flush = |piece: &mut Vec<u8>| {
            if stop.load(Ordering::Relaxed) {
                return Err(io::Error::new(io::ErrorKind::Interrupted, "stopped"));
            }
            pieces.push(blake3::hash(piece).into());
            output.write_all(piece)?;
            piece.clear();
            // A single wait for all of it at the end could not be stopped.
            if pieces.len().is_multiple_of(SYNC / PIECE) {
                output.sync_data()?;
            }
            Ok(())
        };
        for copy in &self.copies {
            // A piece is a multiple of the alignment, so padding never crosses its end.
            piece.resize(piece.len().next_multiple_of(ALIGNMENT), 0);
            let mut rest = copy.region.as_slice();
            while !rest.is_empty() {
                if piece.len() == PIECE {
                    flush(&mut piece)?;
                }
                let (now, later) = rest.split_at(rest.len().min(PIECE - piece.len()));
                piece.extend_from_slice(now);
                rest = later;
            }
        }
        if !piece.is_empty() {
            flush(&mut piece)?;
        }
        Ok(pieces)
    }
}

#[cfg(test)]
mod tests;
