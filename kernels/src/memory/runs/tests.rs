//! Runs of a pool beside the string they stand for.

use std::fs::File;
use std::os::fd::{AsFd as _, FromRawFd as _};
use std::os::unix::net::UnixStream;

use super::*;

/// A pool whose bytes differ, and runs of it with the string that they make.
fn scattered() -> (BlockMemory, Runs, Vec<u8>) {
    let memory = BlockMemory::zeroed(2, 64, [4096, 512]).unwrap();
    for layer in 0..2 {
        for region in Region::BOTH {
            let n_bytes = 64 * memory.block_bytes(region);
            let bytes: Vec<u8> = (0..n_bytes).map(|i| (i * 31 + i / 251 + layer * 7 + region as usize) as u8).collect();
            memory.write(layer, region, 0, &bytes).unwrap();
        }
    }
    let (mut runs, mut string) = (memory.runs(), Vec::new());
    for i in 0..600 {
        let (layer, region) = (i % 2, Region::BOTH[i / 2 % 2]);
        let (offset, len) = (i * 37 % 20_000, 1 + i * 53 % 900);
        runs.push(layer, region, offset, len).unwrap();
        let mut bytes = vec![0; len];
        memory.read(layer, region, offset, &mut bytes).unwrap();
        string.extend(bytes);
    }
    assert_eq!(runs.n_bytes(), string.len());
    (memory, runs, string)
}

/// As many equal runs in an empty pool, with what they hold.
fn empty_of(n_bytes: usize) -> (BlockMemory, Runs) {
    let memory = BlockMemory::zeroed(1, 1024, [1024, 1]).unwrap();
    let mut runs = memory.runs();
    for (i, at) in (0..n_bytes).step_by(700).enumerate() {
        runs.push(0, Region::Key, i * 1024, 700.min(n_bytes - at)).unwrap();
    }
    (memory, runs)
}

fn string_of(memory: &BlockMemory, n_bytes: usize) -> Vec<u8> {
    let mut string = vec![0; n_bytes];
    for (i, part) in string.chunks_mut(700).enumerate() {
        memory.read(0, Region::Key, i * 1024, part).unwrap();
    }
    string
}

#[test]
fn a_socket_carries_the_string_however_it_is_cut() {
    let (_pool, runs, string) = scattered();
    let (target, into) = empty_of(string.len());
    let (near, far) = UnixStream::pair().unwrap();
    let head = b"head";
    let (mut sent, mut received, mut read_head) = (0, 0, [0; 4]);
    while received < string.len() {
        if sent < head.len() + string.len() {
            match runs.send(near.as_fd(), head, sent) {
                Ok(n) => sent += n,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
        if received == 0 {
            io::Read::read_exact(&mut &far, &mut read_head).unwrap();
        }
        received += into.receive(far.as_fd(), received).unwrap();
    }
    assert_eq!((&read_head, received), (head, string.len()));
    assert_eq!(string_of(&target, string.len()), string);
    drop(near);
    assert_eq!(into.receive(far.as_fd(), 0).unwrap(), 0, "the peer has closed");
}

/// What two processes would share.
fn shared(n_bytes: usize) -> SharedMemory {
    // SAFETY: makes a new file, whose descriptor nobody else owns.
    let file = unsafe {
        let descriptor = libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        File::from_raw_fd(descriptor)
    };
    file.set_len(n_bytes as u64).unwrap();
    // SAFETY: seals the file that was just made.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) }, 0);
    SharedMemory::map(&file).unwrap()
}

#[test]
fn shared_memory_carries_the_string_however_it_is_cut_and_lies() {
    let (_pool, runs, string) = scattered();
    let (target, into) = empty_of(string.len());
    let mut memory = shared(20_000);
    let (mut put, mut taken) = (Checksum::new(), Checksum::new());
    let mut at = 0;
    for n_bytes in [1, 63, 64, 65, 4_095, 4_097, 9_999].into_iter().cycle() {
        let (n_bytes, position) = (n_bytes.min(string.len() - at), at % 10_001);
        runs.put(&mut memory, position, at, n_bytes, &mut put);
        into.take(&memory, position, at, n_bytes, &mut taken);
        at += n_bytes;
        if at == string.len() {
            break;
        }
    }
    assert_eq!(string_of(&target, string.len()), string);
    assert_eq!([put.value(), taken.value()], [Checksum::of(&string); 2]);
}

#[test]
#[should_panic(expected = "within the shared memory")]
fn nothing_is_put_beyond_shared_memory() {
    let (_pool, runs, _) = scattered();
    runs.put(&mut shared(4096), 4000, 0, 97, &mut Checksum::new());
}

#[test]
fn memory_of_a_process_is_pulled_and_what_it_has_not_is_an_error() {
    let (_pool, runs, string) = scattered();
    let (target, into) = empty_of(string.len());
    let mut remote = RemoteRuns::default();
    runs.runs.iter().for_each(|run| remote.push(run.address as u64, run.len));
    assert_eq!(remote.n_bytes(), string.len());
    let own = std::process::id();
    let mut at = 0;
    while at < string.len() {
        at += into.pull(own, &remote, at..string.len().min(at + 1_000)).unwrap();
    }
    assert_eq!(string_of(&target, string.len()), string);
    let secret = *b"0123456789abcdef";
    let mut read = [0; 16];
    pull_bytes(own, secret.as_ptr() as u64, &mut read).unwrap();
    assert_eq!(read, secret);
    assert!(pull_bytes(own, 8, &mut read).is_err());
    assert!(pull_bytes(u32::MAX, 8, &mut read).is_err());
}

#[test]
fn a_checksum_is_of_the_string_and_not_of_how_it_lies() {
    let (_pool, runs, string) = scattered();
    let mut checksum = Checksum::new();
    runs.sum(0, 1_000, &mut checksum);
    runs.sum(1_000, string.len() - 1_000, &mut checksum);
    assert_eq!(checksum.value(), Checksum::of(&string));
}
